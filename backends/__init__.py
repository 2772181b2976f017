"""Arrays, devices and runtimes: what runs a model."""

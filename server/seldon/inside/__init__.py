"""What runs in the worker of a Seldon component, on any Python with numpy and orjson."""

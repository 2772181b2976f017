"""Arrays, devices and runtimes: what runs a model."""

import os

# ONNX Runtime 1.29 and later report sessions and errors to Microsoft unless disabled before the import. Also, a run
# that raises costs 370 us with it and 35 without (docs/adr/0011).
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

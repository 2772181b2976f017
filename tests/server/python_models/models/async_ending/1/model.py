import asyncio
import json
import sys

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """Ends in the way that the parameter `do` says what its coroutine runs on."""

    async def execute(self, requests):
        do = json.loads(requests[0].parameters())["do"]
        if do == "exit":
            sys.exit("bye")
        if do == "cancel":
            raise asyncio.CancelledError
        if do == "stop":
            asyncio.get_running_loop().stop()
        if do == "exit in a task":
            asyncio.get_running_loop().call_soon(sys.exit)
        await asyncio.sleep(0)
        return [pb_utils.InferenceResponse([])]

"""RequestTemplate: what identical requests share, so that each further one costs little more than decoding its tensors.

Remembered by `layout.py` and `rpc/layout.py`, by the request's text. For shared memory only the location is remembered:
each request takes its own leases, from the regions registered at that time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.batching.request import InferRequest, input_bytes

from .call_parameters import PerOutputPlan
from .regions import Lease
from .shared_tensors import SharedInput, set_output_targets

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.backends.backend import Array
    from penstock.batching.model import Model
    from penstock.batching.request import Sink

    from .call_parameters import Options, OutputMode
    from .regions import Location, Regions


class RequestTemplate:
    """Everything but the tensors of a decoded request. Slots are read twice as fast as members of a named tuple.

    `modes` are those of the outputs, with a location in place of each lease; None if no output goes into shared memory,
    in which case all such requests share `options`. `shared_positions` are the positions of inputs outside the request
    itself: the bytes the server holds for each are counted per request, since the name may refer to another region by
    then.
    """

    __slots__ = (
        "all_shared", "hook_outputs", "key", "modes", "options", "regions", "rows", "shared_positions", "wanted",
    )  # fmt: skip

    def __init__(
        self, request: InferRequest, options: Options, regions: Regions, locations: Sequence[object] = ()
    ) -> None:  # fmt: skip
        """`regions` are those the request may name; `locations` gives the location of each input."""
        self.key = request.key
        self.rows = request.rows
        self.wanted = request.output_positions
        self.shared_positions = [
            position for position, location in enumerate(locations) if isinstance(location, SharedInput)
        ]
        self.regions = regions
        plan = options.plan
        self.modes: tuple[OutputMode | Location, ...] | None = None
        self.all_shared = False
        self.options = options
        if type(plan) is PerOutputPlan and Lease in map(type, plan.modes):
            self.modes = tuple([mode.location if type(mode) is Lease else mode for mode in plan.modes])
            self.all_shared, self.hook_outputs = plan.all_shared, plan.hook_outputs
            self.options = options.with_plan(None)

    def make_request(
        self, model: Model, inputs: list[Array | None], sink: Sink, nbytes: int, request_id: str
    ) -> tuple[InferRequest, Options]:
        """Make another request, of `nbytes`. Raises: InferError if a region is gone or is a different one."""
        request = InferRequest(model, inputs, self.rows, self.key, self.wanted, sink)
        request.id = request_id
        request.nbytes = nbytes
        if self.shared_positions:
            request.nbytes += input_bytes(map(inputs.__getitem__, self.shared_positions))
        return request, self.options if self.modes is None else self._with_leases(request, self.modes)

    def _with_leases(self, request: InferRequest, modes: Sequence[OutputMode | Location]) -> Options:
        """Take leases for one request. Separate, so that `make_request` shares no variables with a comprehension."""
        lease = self.regions.lease
        plan = PerOutputPlan(
            tuple([lease(*mode) if isinstance(mode, tuple) else mode for mode in modes]),
            self.all_shared,
            self.hook_outputs,
        )
        if request.model.in_place_devices:
            set_output_targets(request, plan)
        return self.options.with_plan(plan)

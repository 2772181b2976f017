"""Alike: what identical requests share, so that each further one costs little more than decoding its tensors.

Remembered by `layout.py` and `rpc/layout.py`, by the request's text. For shared memory only the location is remembered:
each request takes its own leases, from the regions registered at that time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.batching.request import InferRequest, input_bytes

from .call_parameters import PerOutputPlan
from .regions import Lease
from .shared_tensors import SharedInput, aim

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.backends.backend import Array
    from penstock.batching.model import Model
    from penstock.batching.request import Sink

    from .call_parameters import Options, Way
    from .regions import Regions, Where


class Alike:
    """Everything but the tensors of a decoded request. Slots are read twice as fast as members of a named tuple.

    `ways` are those of the outputs, with a location in place of each lease; None if no output goes into shared memory,
    in which case all such requests share `options`. `beside` are the positions of inputs outside the request itself:
    the bytes the server holds for each are counted per request, since the name may refer to another region by then.
    """

    __slots__ = ("beside", "key", "options", "own", "regions", "rows", "stored", "wanted", "ways")

    def __init__(
        self, request: InferRequest, options: Options, regions: Regions, places: Sequence[object] = ()
    ) -> None:  # fmt: skip
        """`regions` are those the request may name; `places` gives the location of each input."""
        self.key = request.key
        self.rows = request.rows
        self.wanted = request.output_positions
        self.beside = [position for position, place in enumerate(places) if isinstance(place, SharedInput)]
        self.regions = regions
        plan = options.plan
        self.ways: tuple[Way | Where, ...] | None = None
        self.stored = False
        self.options = options
        if type(plan) is PerOutputPlan and Lease in map(type, plan.ways):
            self.ways = tuple([way.where if type(way) is Lease else way for way in plan.ways])
            self.stored, self.own = plan.stored, plan.own
            self.options = options.with_plan(None)

    def request(
        self, model: Model, inputs: list[Array | None], sink: Sink, nbytes: int, request_id: str
    ) -> tuple[InferRequest, Options]:
        """Make another request, of `nbytes`. Raises: InferError if a region is gone or is a different one."""
        request = InferRequest(model, inputs, self.rows, self.key, self.wanted, sink)
        request.id = request_id
        request.nbytes = nbytes
        if self.beside:
            request.nbytes += input_bytes(map(inputs.__getitem__, self.beside))
        return request, self.options if self.ways is None else self._leased(request, self.ways)

    def _leased(self, request: InferRequest, ways: Sequence[Way | Where]) -> Options:
        """Take leases for one request. Separate, so that `request` has no variables shared with a comprehension."""
        lease = self.regions.lease
        plan = PerOutputPlan(
            tuple([lease(*way) if isinstance(way, tuple) else way for way in ways]), self.stored, self.own
        )
        if request.model.in_place_devices:
            aim(request, plan)
        return self.options.with_plan(plan)

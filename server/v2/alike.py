"""Alike: what requests that say the same have in common, so that each further one costs little but its tensors.

`layout.py` and `rpc/layout.py` remember it by what was said. Nothing of shared memory is remembered but where it is:
each request takes leases of its own, from the regions that there are then.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.batching.request import InferRequest, bytes_of

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
    """All but the tensors of a request that was decoded. Its slots are read twice as fast as a named tuple's members.

    `ways` are those of outputs, with a place for each lease; None where no output goes into shared memory. Then
    `options` are shared by all such requests. `beside` are the positions of inputs that are not in the request itself:
    what the server holds of each is counted anew, since another region may have the name by then.
    """

    __slots__ = ("beside", "key", "options", "own", "regions", "rows", "stored", "wanted", "ways")

    def __init__(
        self, request: InferRequest, options: Options, regions: Regions, places: Sequence[object] = ()
    ) -> None:  # fmt: skip
        """`regions` are those that it may name; `places` say of each input where it is."""
        self.key = request.key
        self.rows = request.rows
        self.wanted = request.wanted
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
        """Make one more, of `nbytes`. Raises: InferError where a region is not there any more, or another."""
        request = InferRequest(model, inputs, self.rows, self.key, self.wanted, sink)
        request.id = request_id
        request.nbytes = nbytes
        if self.beside:
            request.nbytes += bytes_of(map(inputs.__getitem__, self.beside))
        return request, self.options if self.ways is None else self._leased(request, self.ways)

    def _leased(self, request: InferRequest, ways: Sequence[Way | Where]) -> Options:
        """Take leases for one request. Apart, so that `request` has no variables that a comprehension shares."""
        lease = self.regions.lease
        plan = PerOutputPlan(
            tuple([lease(*way) if isinstance(way, tuple) else way for way in ways]), self.stored, self.own
        )
        if request.model.in_place:
            aim(request, plan)
        return self.options.with_plan(plan)

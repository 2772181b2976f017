"""Routes: one model as named in gRPC requests, and one decoded request to it. Made by `inference.py`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.server.v2.call_parameters import Options, PerOutputPlan

from .encode import RpcEncoder
from .layout import RpcLayouts

if TYPE_CHECKING:
    from penstock.batching.model import Model
    from penstock.batching.request import InferRequest
    from penstock.server.v2.regions import InlineRegions


class RpcModelRoute:
    """One model as named in requests; dropped when the Engine's generation changes.

    `direct`: its requests go to the queue and get one answer, without hooks. `forwards_headers`: forwarded header
    fields are passed to the model.
    """

    __slots__ = ("direct", "encoder", "forwards_headers", "hooked", "layouts", "model", "regions", "uses_stream")

    def __init__(self, model: Model, regions: InlineRegions, *, hooked: bool, forwards: bool) -> None:
        self.model = model
        self.encoder = RpcEncoder(
            model.name, model.version, model.signature, has_own_outputs=model.spec.reads_parameters
        )
        self.layouts = RpcLayouts(regions)
        self.hooked = hooked
        self.uses_stream = model.spec.is_streaming
        self.forwards_headers = forwards and model.spec.reads_parameters
        self.direct = not (hooked or model.spec.decoupled or self.forwards_headers)
        self.regions = regions

    def encoding(self, options: Options) -> RpcEncoder | PlannedEncoding:
        """Return the encoding of a request's answer."""
        plan = options.plan
        return PlannedEncoding(self.encoder, plan) if type(plan) is PerOutputPlan else self.encoder


class PlannedEncoding:
    """The context of a request whose outputs are not all returned as they are."""

    __slots__ = ("encoder", "plan")

    def __init__(self, encoder: RpcEncoder, plan: PerOutputPlan) -> None:
        self.encoder = encoder
        self.plan = plan


class DecodedRequest:
    """One decoded request. `hooked`: it passes through hooks; `decoupled`: it may have any number of answers."""

    __slots__ = ("decoupled", "encoding", "hooked", "options", "request", "route")

    def __init__(self, route: RpcModelRoute, request: InferRequest, options: Options) -> None:
        self.route = route
        self.request = request
        self.options = options
        self.hooked = route.uses_stream or (route.hooked and options.hooks)
        self.decoupled = route.model.spec.decoupled
        self.encoding = route.encoding(options)

"""`GET /v1/models`: the one model that is served."""

from __future__ import annotations

from typing import Any

from sgl.errors import ModelNotFound
from sgl.server.call import Call
from sgl.server.routes import Routes

routes = Routes()


@routes.get("/v1/models", "user")
async def models(call: Call) -> Any:
    """The models that are served."""
    return {"object": "list", "data": [_card(call)]}


@routes.get("/v1/models/{model:path}", "user")
async def model(call: Call) -> Any:
    """One model."""
    name = call.request.path_params["model"]
    if name != call.server.model:
        raise ModelNotFound(f"the model {name!r} is not served here", hint=f"this server has {call.server.model!r}")
    return _card(call)


def _card(call: Call) -> dict[str, Any]:
    server = call.server
    return {
        "id": server.model,
        "object": "model",
        "created": server.created,
        "owned_by": "sgl",
        "root": server.model,
        "max_model_len": server.context_len,
    }

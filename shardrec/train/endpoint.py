"""A run's model behind HTTP, to try it: a WSGI application.

::

    GET  /          what the model is, and an example of a request
    GET  /health    {"status": "ok"}, for health checks
    POST /predict   {"rows": [{"user": "u17", "price": 3.5, ...}, ...]}  →  {"probabilities": [0.71, ...]}

One process computes one request at a time. To serve many requests, use ``shardrec export``; see docs/serving.md.
Answers of a model that follows a publisher have two headers, ``Shardrec-Version`` and ``Shardrec-Age``, in seconds.
"""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from waitress.server import BaseWSGIServer, create_server
from werkzeug.exceptions import BadRequest, HTTPException, MethodNotAllowed, NotFound
from werkzeug.wrappers import Request, Response

from shardrec.data import FeatureSpec, batch_of_request, request_example
from shardrec.errors import ConfigError, DataError
from shardrec.files import parse_json

if TYPE_CHECKING:
    from _typeshed.wsgi import StartResponse, WSGIEnvironment
    from torch import nn

__all__ = ["Endpoint", "open_server"]

_MOST_BYTES = 4 << 20
"""Of a request; while one is parsed, the others wait."""
_THREADS = 8
_CONNECTIONS = 100
_SILENT_S = 30
"""How long a connection may be open without a word."""


class Endpoint:
    """Answers requests with a model's predictions.

    Args:
        model: from (dense, sparse) to (B,) or (B, 1) logits, in eval mode, on the CPU.
        spec: of the data that it was trained on.
        about: the description shown at ``/``.
        output: name of the results: ``probabilities``, or ``scores`` if the model's logits are not log odds.
    """

    def __init__(
        self, model: nn.Module, spec: FeatureSpec, about: Mapping[str, Any], *, output: str = "probabilities"
    ) -> None:
        self._model = model
        self._spec = spec
        self._about = dict(about)
        self._output = output
        self._one_at_a_time = threading.Lock()

    def __call__(self, environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        """The WSGI call."""
        request = Request(environ)
        request.max_content_length = _MOST_BYTES
        try:
            answer, status = self._answer(request), 200
        except DataError as error:
            answer, status = {"error": str(error)}, 400
        except HTTPException as error:
            answer, status = {"error": error.description}, error.code or 500
        response = Response(json.dumps(answer) + "\n", status=status, mimetype="application/json")
        follower: Any = getattr(self._model, "follower", None)
        if follower is not None:
            version, age = follower.seen()
            response.headers.update({"Shardrec-Version": str(version), "Shardrec-Age": f"{age:.3f}"})
        return response(environ, start_response)

    def _answer(self, request: Request) -> dict[str, Any]:
        routes = {
            "/": ("GET", self._describe),
            "/health": ("GET", lambda _: {"status": "ok"}),
            "/predict": ("POST", self._predict),
        }
        if request.path not in routes:
            raise NotFound(f"there is no {request.path}: GET / says what there is")
        method, answer = routes[request.path]
        if request.method not in (method, "HEAD" if method == "GET" else method):
            raise MethodNotAllowed([method], f"{request.path} takes {method}, not {request.method}")
        return answer(request)

    def _describe(self, request: Request) -> dict[str, Any]:
        example = {"rows": [request_example(self._spec)]}
        return {"model": self._about, "predict": {"method": "POST", "path": "/predict", "example": example}}

    def _predict(self, request: Request) -> dict[str, Any]:
        try:
            given = parse_json(request.get_data())
        except ValueError as error:
            raise BadRequest(f'the body is not JSON ({error}): give {{"rows": [...]}}') from error
        if not isinstance(given, dict) or set(given) != {"rows"}:
            raise BadRequest('the body must be an object with the one field "rows", a list')
        batch = batch_of_request(given["rows"], self._spec)
        with self._one_at_a_time, torch.no_grad():
            logits = self._model(batch.dense, batch.sparse).view(-1).float()
        values = torch.sigmoid(logits) if self._output == "probabilities" else logits
        return {self._output: values.tolist()}


def open_server(endpoint: Endpoint, host: str, port: int) -> BaseWSGIServer:
    """A server that listens; its ``run`` answers until Ctrl-C, or until another thread calls its ``close``.

    A fixed number of threads answers a bounded number of connections; those that stay silent are closed.

    Args:
        endpoint: answers.
        host: address to listen on.
        port: 0 for any that is free; the server's ``effective_port`` is the one.

    Raises:
        ConfigError: if the address is taken or not this machine's.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listening = socket.create_server((host, port), family=family, backlog=128)
    except OSError as error:
        raise ConfigError(
            f"--host {host} --port {port} cannot be listened on ({error}): give another port, or 0 for any"
        ) from error
    return create_server(
        endpoint,
        sockets=[listening],
        threads=_THREADS,
        connection_limit=_CONNECTIONS,
        channel_timeout=_SILENT_S,
        cleanup_interval=_SILENT_S // 3,
        max_request_body_size=_MOST_BYTES,
        ident="shardrec",
    )

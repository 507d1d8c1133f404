"""A run's model behind HTTP, to try it: a WSGI application.

::

    GET  /          what the model is, and an example of a request
    GET  /health    {"status": "ok"}, for health checks
    POST /predict   {"rows": [{"user": "u17", "price": 3.5, ...}, ...]}  →  {"probabilities": [0.71, ...]}
                    of several labels: {"predictions": {"click": [0.71, ...], ...}}
    POST /recommend {"rows": [{"history": ["i3", "i5"]}], "top": 2, "exclude_seen": true}
                    →  {"recommendations": [{"items": ["i9", "i1"], "scores": [4.2, 3.9]}]}

One process computes one request at a time. To serve many requests, use ``shardrec export``. See docs/serving.md.
Answers of a model that follows a publisher have two headers, ``Shardrec-Version`` and ``Shardrec-Age``, in seconds.
"""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch
from waitress.channel import HTTPChannel
from waitress.server import BaseWSGIServer, create_server
from waitress.task import ThreadedTaskDispatcher
from werkzeug.exceptions import BadRequest, HTTPException, MethodNotAllowed, NotFound
from werkzeug.wrappers import Request, Response

from shardrec import ConfigError, DataError
from shardrec.files import parse_json
from shardrec.serve import ServedModel
from shardrec.trainer.data import FeatureSpec, batch_of_request, request_example
from shardrec.trainer.run.recommend import Recommender
from shardrec.trainer.run.task_metrics import predictions

if TYPE_CHECKING:
    from _typeshed.wsgi import StartResponse, WSGIEnvironment
    from torch import nn

_MAX_BYTES = 4 << 20
"""Of a request; while one is parsed, the others wait."""
_THREADS = 8
_CONNECTIONS = 100
_REQUEST_S = 30
"""How long a connection may take for a request to arrive whole, and for its answer to be read."""


class Endpoint:
    """Answers requests with a model's predictions.

    Args:
        model: from (dense, sparse) to logits, in eval mode, on the CPU.
        spec: of the data that it was trained on.
        about: the description shown at ``/``.
        loss: of its run. Logits of other losses than ``bce`` are not log odds, and are answered as ``scores``.
        example: values of a row of its data, by feature, as far as they are known.
    """

    def __init__(
        self,
        model: nn.Module,
        spec: FeatureSpec,
        about: Mapping[str, str],
        *,
        loss: str = "bce",
        example: Mapping[str, object] | None = None,
    ) -> None:
        self._model = model
        self._spec = spec
        self._about = dict(about)
        self._loss = loss
        self._example = example
        self._one_at_a_time = threading.Lock()
        self._follower = model.follower if isinstance(model, ServedModel) else None
        self._catalogue_version: int | None = None  # that the catalogue is of
        try:
            self._recommender: Recommender | ConfigError = Recommender(model, spec, torch.device("cpu"))
        except ConfigError as error:
            self._recommender = error
        else:
            if self._follower is None:
                self._recommender.catalogue.look_up()

    def __call__(self, environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        """The WSGI call."""
        request = Request(environ)
        request.max_content_length = _MAX_BYTES
        try:
            answer, status = self._answer(request), 200
        except (ConfigError, DataError) as error:
            answer, status = {"error": str(error)}, 400
        except HTTPException as error:
            answer, status = {"error": error.description}, error.code or 500
        response = Response(json.dumps(answer) + "\n", status=status, mimetype="application/json")
        if self._follower is not None:
            version, age = self._follower.seen()
            response.headers.update({"Shardrec-Version": str(version), "Shardrec-Age": f"{age:.3f}"})
        return response(environ, start_response)

    def _answer(self, request: Request) -> dict[str, object]:
        routes: dict[str, tuple[str, Callable[[Request], dict[str, object]]]] = {
            "/": ("GET", self._describe),
            "/health": ("GET", lambda _: {"status": "ok"}),
            "/predict": ("POST", self._predict),
            "/recommend": ("POST", self._recommend),
        }
        if request.path not in routes:
            raise NotFound(f"{request.path} does not exist: GET / lists the paths")
        method, answer = routes[request.path]
        if request.method not in (method, "HEAD" if method == "GET" else method):
            raise MethodNotAllowed([method], f"{request.path} takes {method}, not {request.method}")
        return answer(request)

    def _describe(self, request: Request) -> dict[str, object]:
        description: dict[str, object] = {"model": self._about}
        if isinstance(self._recommender, Recommender):
            row = request_example(self._spec, self._example, absent=self._recommender.absent)
            example: dict[str, object] = {"rows": [row], "top": 10}
            if self._recommender.catalogue.sharing:
                example["exclude_seen"] = True
            description["recommend"] = {"method": "POST", "path": "/recommend", "example": example}
        example = {"rows": [request_example(self._spec, self._example)]}
        return {**description, "predict": {"method": "POST", "path": "/predict", "example": example}}

    def _recommend(self, request: Request) -> dict[str, object]:
        recommender = self._recommender
        if isinstance(recommender, ConfigError):
            raise recommender
        body = _body(request, optional={"top", "exclude_seen"})
        k, exclude_seen = body.get("top", 10), body.get("exclude_seen", False)
        if type(k) is not int or not 1 <= k < recommender.catalogue.rows:
            raise BadRequest(f'"top" is {k!r}: give a number from 1 to {recommender.catalogue.rows - 1:,}, the items')
        if type(exclude_seen) is not bool:
            raise BadRequest(f'"exclude_seen" is {exclude_seen!r}: give true or false')
        if exclude_seen:
            recommender.check_seen()
        with self._one_at_a_time:
            if self._follower is not None and self._catalogue_version != (version := self._follower.seen()[0]):
                recommender.catalogue.look_up()
                self._catalogue_version = version
            return {"recommendations": recommender.answer(body["rows"], k, exclude_seen=exclude_seen)}

    def _predict(self, request: Request) -> dict[str, object]:
        body = _body(request)
        batch = batch_of_request(body["rows"], self._spec)
        with self._one_at_a_time, torch.no_grad():
            logits = self._model(batch.dense, batch.sparse)
        values = predictions(logits, batch.size, self._spec.labels, self._loss)
        if self._spec.labels:
            return {"predictions": {name: scores.tolist() for name, scores in values.items()}}
        return {"probabilities" if self._loss == "bce" else "scores": values[""].tolist()}


def _body(request: Request, *, optional: Collection[str] = ()) -> dict[str, Any]:
    """What a request asks for: rows, and fields that may be left out."""
    try:
        body = parse_json(request.get_data())
    except ValueError as error:
        raise BadRequest(f'the body is not JSON ({error}): give {{"rows": [...]}}') from error
    if not isinstance(body, dict) or not {"rows"} <= set(body) <= {"rows", *optional}:
        also = "".join(f', and may have "{name}"' for name in sorted(optional))
        raise BadRequest(f'the body must be an object with the single field "rows", a list{also}')
    return body


class _Threads(ThreadedTaskDispatcher):  # type: ignore[misc]  # waitress is not typed
    """Threads for predictions, and another for answers that do not wait for the model."""

    def __init__(self) -> None:
        super().__init__()
        self._at_once = ThreadedTaskDispatcher()
        self.set_thread_count(_THREADS)
        self._at_once.set_thread_count(1)

    def add_task(self, channel: HTTPChannel) -> None:
        """Answer the first request of a connection."""
        # There is no path in what is no HTTP.
        computes = getattr(channel.requests[0], "path", None) in ("/predict", "/recommend")
        super().add_task(channel) if computes else self._at_once.add_task(channel)

    def shutdown(self, cancel_pending: bool = True, timeout: float = 5) -> bool:
        """End the threads."""
        self._at_once.shutdown(cancel_pending, timeout)
        return bool(super().shutdown(cancel_pending, timeout))


class _Connection(HTTPChannel):  # type: ignore[misc]
    """A connection with a time limit that runs until a whole request is answered, and is not prolonged by each byte of
    it.

    If there are too many connections, the oldest one by this time is closed.
    """

    def __init__(self, server: BaseWSGIServer, *args: object, **kwargs: object) -> None:
        self._since = time.time()
        super().__init__(server, *args, **kwargs)
        waiting = [each for each in server.active_channels.values() if not each.requests and not each.will_close]
        if len(server.active_channels) > _CONNECTIONS and waiting:
            min(waiting, key=lambda connection: connection.last_activity).will_close = True

    @property
    def last_activity(self) -> float:
        """When the connection was made or last had an answer: waitress closes it at ``channel_timeout`` from then."""
        return self._since

    @last_activity.setter
    def last_activity(self, moment: float) -> None:
        """waitress sets it at each byte."""

    def writable(self) -> bool:
        """Whether there is something to write, or it is to be closed, which waitress does when it can be written to."""
        if self.will_close:
            with suppress(OSError):
                self.socket.shutdown(socket.SHUT_RDWR)  # or a client that does not read would keep it open
        return bool(super().writable())

    def service(self) -> None:
        """Answer a request."""
        super().service()
        self._since = time.time()


def open_server(endpoint: Endpoint, host: str, port: int) -> BaseWSGIServer:
    """A server that listens. Its ``run`` answers until Ctrl-C, or until another thread calls its ``close``.

    A fixed number of threads answers a bounded number of connections. A connection is closed if a request takes longer
    than 30 s to arrive, or its answer to be read; or if there are too many, and it has taken longest.

    Args:
        endpoint: answers.
        host: address to listen on.
        port: 0 for any free port. The server's ``effective_port`` has its number.

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
    server = create_server(
        endpoint,
        sockets=[listening],
        connection_limit=2 * _CONNECTIONS,  # waitress accepts no more while this many wait for the model
        channel_timeout=_REQUEST_S,
        cleanup_interval=_REQUEST_S // 3,
        max_request_body_size=_MAX_BYTES,
        ident="shardrec",
        _dispatcher=_Threads(),
    )
    server.channel_class = _Connection
    return server

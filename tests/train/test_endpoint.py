"""What the HTTP endpoint of a model answers to bodies that are no requests."""

from __future__ import annotations

import pytest
from torch import nn
from werkzeug.test import Client

from shardrec.data import Feature, FeatureSpec
from shardrec.train.endpoint import Endpoint


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "the body is not JSON"),
        (b'{"rows": [{"x": 1}', "the body is not JSON"),
        (b"\xff", "the body is not JSON"),
        (b"[" * 100_000, "the body is not JSON"),
        (b'{"rows": [{"x": 1' + b"0" * 5000 + b"}]}", "the body is not JSON"),
        (b"[]", 'the one field "rows"'),
        (b'{"rows": [{"x": 1, "u": "\\ud800"}]}', "row 0: field 'u': value '\\ud800' is not a text"),
        (b'{"rows": [{"x": 1e39, "u": null}]}', "row 0: field 'x': value '999999999999999"),
    ],
)
def test_a_body_that_is_no_request(body: bytes, words: str) -> None:
    spec = FeatureSpec(features=(Feature(name="x", kind="dense"), Feature(name="u", kind="id", rows=9)))
    answer = Client(Endpoint(nn.Identity(), spec, {})).post("/predict", data=body)
    assert (answer.status_code, list(answer.get_json())) == (400, ["error"])
    assert words in answer.get_json()["error"]

"""The worker of a handler imports it as the original did, and a failed call does not affect others."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from penstock.backends.errors import Code, InferError
from penstock.server.abeja.inside.service import AbejaInside, open_service
from penstock.server.abeja.messages import pack_head
from penstock.server.carrying.messages import CALL, read_answer

CHANNEL: Any = None
UNEXPECTED = b'{"status":"unexpected error occurred"}'


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that a handler works in; its modules are removed from sys.modules afterward."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "modules", {**sys.modules})
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.delenv("CONTEXT", raising=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def opened(handler: str, *, strict: bool = False, beside: tuple[str, ...] = ()) -> AbejaInside:
    return open_service({"handler": handler, "strict": strict, "fallback_folders": [*beside]}, CHANNEL)


def called(service: AbejaInside, body: bytes = b"", boundary: str | None = None) -> tuple[int, bytes]:
    """Call the handler. Returns: status and body."""
    head = pack_head("POST", "text/plain", [("content-type", ["text/plain"])], boundary)
    reply, _ = service.call(CALL, 1, head + body, [])
    status, _, _, content = read_answer(reply)
    return status, content


def inside(handler: Any, *, strict: bool = False) -> AbejaInside:
    return AbejaInside(handler, {}, strict=strict)


def test_a_handler_is_a_callable_in_a_module_of_its_folder(folder: Path) -> None:
    (folder / "abeja_one.py").write_text("def serve(request, context): return {'content': [request.read(), context]}")
    (folder / "abeja_two").mkdir()
    (folder / "abeja_two" / "deep.py").write_text(
        "class Handler(dict):\n    def __init__(self, r, c): self['content'] = 'x'"
    )

    assert called(opened("abeja_one:serve"), b"body") == (200, b"body\n{}".replace(b"\n", b"\n"))
    assert called(opened("abeja_two.deep:Handler")) == (200, b"x")


def test_the_context_comes_from_the_environment_and_persists_between_calls(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "abeja_context.py").write_text(
        "def handler(request, context):\n    context['n'] = context.get('n', 0) + 1\n    return {'content': context}"
    )
    monkeypatch.setenv("CONTEXT", '{"a": 1}')
    service = opened("abeja_context:handler")

    assert [json.loads(called(service)[1]) for _ in range(2)] == [{"a": 1, "n": 1}, {"a": 1, "n": 2}]
    monkeypatch.setenv("CONTEXT", "{")
    with pytest.raises(InferError, match="CONTEXT in the environment is not JSON"):
        opened("abeja_context:handler")


@pytest.mark.parametrize("handler", ["main", "a:b:c", "", ":", "main:", ":handler", "abeja_lacks:none", "abeja_none:x"])
def test_an_invalid_handler_name_is_rejected(folder: Path, handler: str) -> None:
    (folder / "abeja_lacks.py").write_text("")
    with pytest.raises(InferError) as caught:
        opened(handler)
    assert caught.value.code is Code.INVALID
    assert caught.value.message.startswith(f"handler '{handler}'")


@pytest.mark.parametrize("source", ["1/0", "def", "raise SystemExit(5)", "import abeja_nothing_like_it"])
def test_a_module_that_cannot_be_imported_is_rejected(folder: Path, source: str) -> None:
    (folder / "abeja_broken.py").write_text(source)
    with pytest.raises(InferError, match="handler 'abeja_broken:handler' cannot be imported: "):
        opened("abeja_broken:handler")


def test_modules_in_the_fallback_folders_can_be_imported(folder: Path) -> None:
    (folder / "there").mkdir()
    (folder / "there" / "abeja_beside.py").write_text("said = 'there'")
    (folder / "abeja_uses.py").write_text(
        "import abeja_beside\ndef handler(r, c): return {'content': abeja_beside.said}"
    )

    assert called(opened("abeja_uses:handler", beside=(str(folder / "there"),))) == (200, b"there")


def test_an_exception_of_a_handler_is_logged_and_not_sent_to_the_client(capfd: pytest.CaptureFixture[str]) -> None:
    def handler(request: Any, context: Any) -> Any:
        raise ValueError("deep inside")

    assert called(inside(handler)) == (500, UNEXPECTED)
    assert "ValueError: deep inside" in capfd.readouterr().err


def test_an_invalid_result_of_a_handler_is_answered_500(capfd: pytest.CaptureFixture[str]) -> None:
    assert called(inside(lambda request, context: "text")) == (500, UNEXPECTED)
    assert "a handler must return a dict" in capfd.readouterr().err
    assert called(inside(lambda request: {})) == (500, UNEXPECTED)


def test_errors_are_answered_even_if_stderr_is_closed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A handler may have closed stderr, as programs do that become daemons."""
    with (tmp_path / "closed").open("w") as closed:
        pass
    monkeypatch.setattr(sys, "stderr", closed)

    assert called(inside(lambda request, context: "text")) == (500, UNEXPECTED)
    assert called(inside(lambda request, context: {"content_type": "bad;;"}))[0] == 501


@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt, GeneratorExit])
def test_exit_exceptions_of_a_handler_reach_the_worker(error: type[BaseException]) -> None:
    def handler(request: Any, context: Any) -> Any:
        raise error

    with pytest.raises(error):
        called(inside(handler))


def test_coroutines_are_awaited_on_the_same_loop_in_every_call() -> None:
    import asyncio

    loops = []

    async def handler(request: Any, context: Any) -> Any:
        await asyncio.sleep(0)
        loops.append(asyncio.get_running_loop())
        return {"content": request.read()}

    service = inside(handler)
    assert [called(service, b"a"), called(service, b"b")] == [(200, b"a"), (200, b"b")]
    assert loops[0] is loops[1]
    service.close()
    assert called(inside(handler, strict=True)) == (500, UNEXPECTED)


def test_a_malformed_form_is_answered_400_without_calling_the_handler() -> None:
    status, body = called(inside(None), b"hello", "edge")

    assert (status, json.loads(body)["status"]) == (400, "the form cannot be read: it does not contain its boundary")


def test_a_request_body_can_be_returned_as_the_content() -> None:
    assert called(inside(lambda request, context: {"content": request["contents"][0]["body"]}), b"a\nb") == (
        200,
        b"a\nb",
    )


def test_the_cache_of_request_heads_is_bounded() -> None:
    service = inside(lambda request, context: {"content": request["http_headers"]["n"]})
    for number in range(600):
        reply, _ = service.call(CALL, 1, pack_head("GET", "t", [("n", [str(number)])], None), [])
        assert read_answer(reply)[3] == str(number).encode()

    assert len(service._heads) <= 256

"""Requests of all kinds, echoed by the handler: methods, paths, queries, headers, types, bodies and parts."""

from __future__ import annotations

from tests.originals import FORM, URLENCODED, RecordedRequest, get, multipart, post

from .definitions import TEXT, group, text

_FORM_DATA = "Content-Disposition: form-data"
_NAMED = f'{_FORM_DATA}; name="a"'


def _part(head: str, content: bytes = b"1") -> bytes:
    return f"--edge\r\n{head}\r\n\r\n".encode() + content + b"\r\n--edge--\r\n"


AS_CURL = multipart(
    ("file1", '{"foo": "bar"}', None, "application/json"),
    ("f2", b"\xff\xd8\xff", "cat.jpg", "image/jpeg"),
    ("plain", "v"),
)
GZIPPED = bytes.fromhex("1f8b08000000000000 03cb480400ac2a93d802000000")
TYPES = {
    "json": "application/json",
    "charset": "application/json; charset=utf8",
    "urlencoded": URLENCODED,
    "octets": "application/octet-stream",
    "capitals": "TEXT/Plain; Charset=UTF-8",
    "one-word": "text",
    "no-subtype": "text/",
    "no-type": "/plain",
    "slash": "/",
    "two-slashes": "a/b/c",
    "semicolon-first": ";text/plain",
    "semicolon-only": ";",
    "bad": "bad;;",
    "semicolon-last": "text/plain;",
    "semicolon-spaced": "text/plain ; a=b",
    "semicolons-last": "text/plain; ;",
    "parameter-without-value": "text/plain; charset",
    "parameter-of-nothing": "text/plain; charset=",
    "parameter-twice": "text/plain; a=1; a=2",
    "parameter-twice-alike": "text/plain; a=1; a=1",
    "parameter-quoted": 'text/plain; a="b;c"',
    "parameter-escaped": 'text/plain; a="b\\"c"',
    "parameter-open-quote": 'text/plain; a="b',
    "parameter-spaced": "text/plain; a = b",
    "parameter-encoded": "text/plain; a*=utf-8''%e6%97%a5",
    "parameter-continued": 'text/plain; a*0="x"; a*1="y"',
    "space-within": "text /plain",
    "two-words": "text/plain html",
    "comma": "text/plain, text/html",
    "wildcard": "*/*",
    "not-ascii": "text/\xe9",
    "not-ascii-parameter": "text/plain; a=\xe9",
    "at": "te@xt/plain",
    "multipart-mixed": "multipart/mixed; boundary=edge",
    "multipart": "multipart/form-data",
    "multipart-related": "multipart/related",
    "twice": "a/b\r\nContent-Type: c/d",
}
PATHS = {
    "any": "/any/path?foo=bar&baz=qux",
    "none": "/?",
    "not-decoded": "/?a=%20b+c",
    "two-questions": "/?a?b?c",
    "percent": "/?100%",
    "semicolons": "/?a=1;b=2",
    "japanese-encoded": "/?a=%E6%97%A5",
    "brackets": "/?a[]=1&a[]=2",
    "hash": "/?a#b",
    "quotes": '/?a="b"',
    "health-like": "/health_check/?a",
    "health-longer": "/health_checks?a",
    "double-slash-in-the-query": "/?a=//b/../c",
    "encoded-path": "/a%2Fb?x",
    "encoded-space": "/a%20b?x",
    "slash-last": "/a/b/?x",
    "dotted": "/a.b?x",
    "long": "/?" + "a=1&" * 2000,
}
UNCLEAN = {
    "two-slashes": "//a?x",
    "two-slashes-within": "/a//b?x",
    "dots": "/a/../b?x",
    "dot": "/a/./b?x",
    "dots-last": "/a/..",
}
PARTS = {
    "as-curl": AS_CURL,
    "one": multipart(("a", "1")),
    "same-name": multipart(("a", "1"), ("a", "2")),
    "empty-value": multipart(("a", "")),
    "empty-file": multipart(("a", "", "x.bin")),
    "file-without-type": multipart(("a", "1", "x.bin")),
    "file-name-empty": multipart(("a", "1", "")),
    "file-name-japanese": multipart(("a", "1", "日本.jpg")),
    "file-name-with-a-folder": multipart(("a", "1", "../b/c.txt")),
    "file-name-with-backslashes": multipart(("a", "1", "C:\\b\\c.txt")),
    "file-name-of-dots": multipart(("a", "1", "..")),
    "file-name-escaped": multipart(("a", "1", 'x\\"y.txt')),
    "file-name-with-a-semicolon": multipart(("a", "1", "x;y.txt")),
    "name-japanese": multipart(("日本", "1")),
    "name-empty": multipart(("", "1")),
    "name-escaped": multipart(('a\\"b', "1")),
    "type-with-parameters": multipart(("a", "1", None, "text/plain; charset=utf-8")),
    "type-bad": multipart(("a", "1", None, ";;")),
    "type-empty": multipart(("a", "1", None, "")),
    "octets": multipart(("a", bytes(range(256)), "x", "application/octet-stream")),
    "newlines": multipart(("a", "\r\nx\r\n\r\n")),
    "edge-like": multipart(("a", "--edg\r\n--edgy\r\n-- edge")),
    "many": multipart(*((f"n{at}", str(at)) for at in range(60))),
    "preamble": b"ignore me\r\n" + AS_CURL + b"and me",
    "none": b"--edge--\r\n",
    "none-without-newline": b"--edge--",
    "without-last-newline": AS_CURL[:-2],
    "line-feeds": b'--edge\nContent-Disposition: form-data; name="a"\n\n1\n--edge--\n',
    "no-quotes": _part(f"{_FORM_DATA}; name=a; filename=b"),
    "no-disposition": _part("Content-Type: text/plain"),
    "no-headers": b"--edge\r\n\r\n1\r\n--edge--\r\n",
    "no-name": _part(_FORM_DATA),
    "attachment": _part('Content-Disposition: attachment; name="a"; filename="b"'),
    "small-letters": _part('content-disposition: form-data; name="a"\r\ncontent-type: a/b'),
    "other-order": _part(f"Content-Type: a/b\r\nX-A: 1\r\n{_NAMED}")[:-2],
    "bad-disposition": _part(f'{_FORM_DATA}; name="a'),
    "encoded-file-name": _part(f"{_NAMED}; filename*=utf-8''%e6%97%a5.jpg"),
    "both-file-names": _part(f"{_NAMED}; filename=\"b\"; filename*=utf-8''%e6%97%a5"),
    "folded": _part(f'{_FORM_DATA};\r\n name="a"'),
    "quoted-printable": _part(f"{_NAMED}\r\nContent-Transfer-Encoding: quoted-printable", b"a=3Db=\r\nc"),
    "base64": _part(f"{_NAMED}\r\nContent-Transfer-Encoding: base64", b"YQ=="),
    "spaces-after-the-edge": f"--edge  \r\n{_NAMED}\r\n\r\n1\r\n--edge--  \r\n".encode(),
}
TRUNCATED = {
    "no-end": AS_CURL[:-10],
    "mid-part": AS_CURL[:90],
    "mid-header": AS_CURL[:30],
    "other-edge": AS_CURL.replace(b"edge", b"else"),
    "nothing": b"",
    "not-a-form": b"hello",
    "bad-header": b"--edge\r\nno colon here\r\n\r\n1\r\n--edge--\r\n",
}


def _chunked(name: str, *chunks: bytes, kind: str = TEXT, tail: bytes = b"0\r\n\r\n", **more: str) -> RecordedRequest:
    body = b"".join(b"%x\r\n%s\r\n" % (len(chunk), chunk) for chunk in chunks) + tail
    return RecordedRequest(name, "/", body, headers={"Content-Type": kind, "Transfer-Encoding": "chunked", **more})


def _headed(name: str, **headers: str) -> RecordedRequest:
    return get(name, "/", headers={key.replace("_", "-"): value for key, value in headers.items()})


HEADERS = [
    _headed("none"),
    _headed("sorted", Zeta="1", Alpha="2", accept="*/*"),
    _headed("repeated", X_Many="one\r\nx-many: two\r\nX-MANY: one"),
    _headed("repeated-apart", X_Many="one\r\nX-Other: o\r\nx-many: two"),
    _headed("comma", X_Many="a, b,c"),
    _headed("empty", X_Empty=""),
    _headed("spaces", X_A="  a  b  "),
    _headed("latin", X_A="\xe9"),
    _headed("utf-8", X_A="日本".encode().decode("latin-1")),
    _headed("tab", X_A="a\tb"),
    _headed("long", X_A="0123456789" * 700),
    _headed("cookies", Cookie="a=b; c=d"),
    _headed(
        "forwarded", X_Forwarded_For="10.0.0.1", Forwarded="for=10.0.0.2", X_Request_Id="r", X_Abeja_Request_Id="r"
    ),
    _headed("symbols", **{"X!#$%&'*+.^`|~": "1", "9": "2"}),
    get("underscore", "/", headers={"x_under_score": "1"}),
    _headed("authorization", Authorization="Bearer t"),
    _headed("authorization-proxy", Proxy_Authorization="Basic x", X_Api_Key="k"),
    _headed("user-agent", User_Agent="mine/1"),
    _headed("content-type-twice", Content_Type="text/plain\r\nContent-Type: application/json"),
    _headed("gzip-accepted", Accept_Encoding="gzip, deflate, br"),
    _headed("te", TE="trailers"),
    _headed("keep-alive-named", Keep_Alive="timeout=5"),
    _headed("range", Range="bytes=0-1", If_None_Match="*"),
]

GROUPS = [
    group(
        "methods",
        "echo:handler",
        [
            text("post"),
            text("put", method="PUT"),
            *(text(f"{each.lower()}-of-text", method=each) for each in ("PATCH", "DELETE", "OPTIONS", "PROPFIND")),
            *(
                get(f"{method.lower()}-without-a-type", "/", method=method)
                for method in ("PATCH", "DELETE", "HEAD", "OPTIONS", "TRACE")
            ),
            get("get-in-small-letters", "/", method="get"),
            text("post-in-small-letters", method="post"),
            get("get-nothing", "/"),
            RecordedRequest("post-nothing", "/"),
            RecordedRequest("post-a-body-without-a-type", "/", b"hello"),
            get("put-without-a-type", "/", method="PUT"),
            text("post-empty", ""),
            text("put-empty", "", method="PUT"),
            text("post-with-a-query", path="/?a=b"),
            get("get", "/?a=b"),
            get("get-with-a-type", "/?a=b", headers={"Content-Type": "application/json"}),
            get("get-with-a-bad-type", "/?a=b", headers={"Content-Type": ";"}),
            get("get-with-parts-as-its-type", "/?a=b", headers={"Content-Type": FORM}),
            text("get-with-a-body", method="GET", path="/?a=b"),
            text("head-with-a-type", "", method="HEAD"),
            get("star", "*", method="OPTIONS"),
            get("whole-url", "http://x/p?a=b"),
        ],
    ),
    group("types", "echo:handler", [text(name, kind=kind) for name, kind in TYPES.items()]),
    group(
        "paths",
        "echo:handler",
        [
            *(get(name, path) for name, path in PATHS.items()),
            *(text(f"post-{name}", path=PATHS[name]) for name in ("any", "health-like", "slash-last")),
            *(get(f"unclean-{name}", path) for name, path in UNCLEAN.items()),
            text("post-unclean", path="/a//b?x"),
        ],
    ),
    group("headers", "echo:handler", HEADERS),
    group(
        "bodies",
        "echo:handler",
        [
            text("octets", bytes(range(256)), "application/octet-stream"),
            text("japanese", "日本"),
            text("gzipped", GZIPPED, headers={"Content-Encoding": "gzip"}),
            text("line-feeds", "a\r\nb\n"),
            text("expected", headers={"Expect": "100-continue"}),
            text("expected-otherwise", headers={"Expect": "x"}),
            _chunked("chunked", b"hel", b"lo"),
            _chunked("chunked-nothing"),
            _chunked("chunked-put-together", *[b"%d" % at for at in range(40)]),
            _chunked("chunked-with-a-trailer", b"hi", tail=b"0\r\nX-After: 1\r\n\r\n", Trailer="X-After"),
            _chunked("chunked-parts", AS_CURL[:50], AS_CURL[50:], kind=FORM),
        ],
    ),
    group(
        "sizes",
        "echo:size",
        [
            text("64k-and-one", b"a" * 65537),
            text("much-in-parts", multipart(("a", b"x" * 5000, "x"), ("b", b"y" * 10000)), FORM),
        ],
    ),
    group(
        "parts",
        "echo:handler",
        [
            *(post(name, "/", body, FORM) for name, body in PARTS.items()),
            text("put", AS_CURL, FORM, "PUT"),
            text("boundary-in-quotes", AS_CURL, 'multipart/form-data; boundary="edge"'),
            text("type-in-capitals", AS_CURL, "MULTIPART/Form-Data; BOUNDARY=edge"),
            text("type-with-a-charset", AS_CURL, "multipart/form-data; charset=utf-8; boundary=edge"),
            text("no-boundary", AS_CURL, "multipart/form-data"),
            text("boundary-empty", AS_CURL, "multipart/form-data; boundary="),
            text("boundary-twice", AS_CURL, "multipart/form-data; boundary=edge; boundary=edge"),
            text("mixed", AS_CURL, "multipart/mixed; boundary=edge"),
        ],
    ),
    group(
        "parts-truncated",
        "echo:handler",
        [post(name, "/", body, FORM, silent=True) for name, body in TRUNCATED.items()],
    ),
]

"""The cases of the document over module B: URLs, and where its arguments come from."""

from __future__ import annotations

from tests.originals import FORM, get, post

from .definitions import RecordedRequest, encoded, form, group, parts, predict, urlencoded

P = "/v2/models/basic/predict/"

DOCUMENTED = [
    get("D1", "/"),
    get("D2", "/v2/"),
    get("D3", "/v2/models/basic/"),
    get("D3-all", "/v2/models/"),
    get("D5", "/v2/models/nope/"),
    post("D5-post", "/v2/models/"),
    get("D6", "/v2/models"),
    post("D6-predict", P[:-1]),
    predict("D7", "basic"),
    predict("D8", "basic", "?arg1=zzz&num=7&flag=true&lst=1&lst=2&strict=b"),
    predict("D9", "basic", "?strict=c&num=x"),
    predict("D11", "basic", value={"arg1": "json", "num": 4, "lst": [1, 2], "unknown": 5}),
    predict("D12", "basic", value="{bad"),
    predict("D12-list", "basic", value=[1]),
    form("D13", "basic", ("data", "of the file", "f.txt", "text/plain"), ("arg1", "multi"), query="?num=11"),
    form("D15", "basic", ("data", "notafile")),
    predict("D15-query", "basic", "?data=q"),
    get("D35", "/v2/debug/"),
]

QUERIES = [
    "", "?", "?&&", "?arg1", "?arg1=", "?arg1=a&arg1=b", "?arg1=a+b", "?arg1=a%20b", "?arg1=a%2Bb", "?arg1=%C3%A9",
    "?arg1=%E9", "?arg1=%zz", "?arg1=%", "?arg1=%00", "?arg1=a;num=5", "?arg1=a;b", "?ARG1=up", "?arg1=a=b", "?=x",
    "?arg1=a%26num=9", "?arg1=%0d%0a", "?arg%31=named", "?num=5", "?num=", "?num=5.0", "?num=5.7", "?num=%205%20",
    "?num=+5", "?num=1_000", "?num=0x10", "?num=1e3", "?num=-0", "?num=%D9%A3", "?num=" + "9" * 40, "?num=true",
    "?num=5&num=6", "?num=null", "?num=NaN", "?flag=1", "?flag=0", "?flag=t", "?flag=TRUE", "?flag=yes", "?flag=Y",
    "?flag=on", "?flag=off", "?flag=n", "?flag=", "?flag=2", "?flag=tRUE", "?flag", "?lst=", "?lst=1", "?lst=1,2",
    "?lst=[1,2]", "?lst=1&lst=x&lst=y", "?lst[]=1", "?lst=1&lst=2&lst=3", "?strict=", "?strict=A", "?strict=a&strict=c",
    "?url=http://example.com", "?url=http%3A%2F%2Fexample.com%2Fa%3Fb%3Dc", "?url=http://a.b/c",
    "?url=ftp://example.com/x",
    "?url=example.com", "?url=", "?url=http://localhost:5000/", "?url=http://127.0.0.1/x",
    "?url=http://user:p@example.com",
    "?url=file:///etc/passwd", "?url=http://ex%20ample.com", "?url=http://b%C3%BCcher.example/",
    "?url=HTTP://EXAMPLE.COM",
    "?num=x&flag=x&lst=x&strict=x&url=x", "?unknown=1", "?arg1=a#num=9", "?a?b=1", "?arg1=a?b", "?num=%EF%BC%95",
]  # fmt: skip

JSON_VALUES = {
    "empty-object": "{}",
    "white": "  {}  ",
    "only-white": "   ",
    "empty-array": "[]",
    "null": "null",
    "text": '"text"',
    "number": "5",
    "true": "true",
    "array-of-objects": '[{"num": 5}]',
    "null-arg": '{"arg1": null}',
    "null-num": '{"num": null}',
    "null-lst": '{"lst": null}',
    "null-url": '{"url": null}',
    "number-for-text": '{"arg1": 5}',
    "list-for-text": '{"arg1": ["a"]}',
    "object-for-text": '{"arg1": {"a": 1}}',
    "true-for-text": '{"arg1": true}',
    "text-for-number": '{"num": "5"}',
    "float-for-number": '{"num": 5.9}',
    "whole-float": '{"num": 5.0}',
    "true-for-number": '{"num": true}',
    "huge": '{"num": 123456789012345678901234567890}',
    "huge-float": '{"num": 1e400}',
    "nan": '{"num": NaN}',
    "infinity": '{"num": -Infinity}',
    "list-for-number": '{"num": [5]}',
    "text-for-flag": '{"flag": "true"}',
    "number-for-flag": '{"flag": 1}',
    "float-for-flag": '{"flag": 1.0}',
    "list-for-flag": '{"flag": []}',
    "scalar-for-list": '{"lst": 5}',
    "text-for-list": '{"lst": "5"}',
    "texts-in-list": '{"lst": ["5", "x", null, 1.5]}',
    "empty-list": '{"lst": []}',
    "nested-list": '{"lst": [[1]]}',
    "object-for-list": '{"lst": {"a": 1}}',
    "null-strict": '{"strict": null}',
    "list-strict": '{"strict": ["a"]}',
    "data": '{"data": "given in JSON"}',
    "twice": '{"num": 1, "num": 2}',
    "escapes": '{"arg1": "\\u00e9\\ud83d\\ude00\\n\\/"}',
    "lone": '{"arg1": "\\ud800"}',
    "accents": '{"arg1": "\u00e9\u4e16"}',
    "deep": '{"arg1": ' + "[" * 50 + "]" * 50 + "}",
    "trailing-comma": '{"num": 1,}',
    "single-quotes": "{'num': 1}",
    "comment": '{"num": 1} // one',
    "two": '{"num": 1}{"num": 2}',
    "control": '{"arg1": "a\nb"}',
    "bom": "\ufeff{}",
    "cut": '{"num": 1',
    "zeros": '{"num": 007}',
    "all-wrong": '{"arg1": 1, "num": "x", "flag": "x", "lst": "x", "strict": "x", "url": "x"}',
}
KINDS = {
    "none": "",
    "upper": "APPLICATION/JSON",
    "charset": "application/json; charset=utf-8",
    "charset-latin": "application/json; charset=latin-1",
    "charset-unknown": "application/json; charset=nonsense",
    "charset-16": "application/json; charset=utf-16",
    "vendor": "application/vnd.api+json",
    "problem": "application/problem+json; charset=utf-8",
    "text-json": "text/json",
    "image-json": "image/x+json",
    "text": "text/plain",
    "octets": "application/octet-stream",
    "nonsense": "nonsense",
    "empty-parameter": "application/json;",
    "spaces": " application/json ; charset=utf-8",
    "two": "application/json, text/plain",
    "urlencoded": "application/x-www-form-urlencoded",
    "any": "*/*",
}

JSONS: list[RecordedRequest] = [predict(f"json-{name}", "basic", value=text) for name, text in JSON_VALUES.items()]
TYPES = [
    *(predict(f"type-{name}", "basic", value='{"num": 5, "arg1": "sent"}', kind=kind) for name, kind in KINDS.items()),
    predict("latin-body", "basic", value='{"arg1": "é"}'.encode("latin-1")),
    predict(
        "latin-body-said", "basic", value='{"arg1": "é"}'.encode("latin-1"), kind="application/json; charset=latin-1"
    ),
    predict("utf-16-body", "basic", value='{"arg1": "é"}'.encode("utf-16"), kind="application/json; charset=utf-16"),
    predict("not-utf-8", "basic", value=b'{"arg1": "\xff"}'),
    predict("binary", "basic", value=bytes(range(256)), kind="application/octet-stream"),
    predict("empty-but-json", "basic", value=b""),
    predict("empty-but-a-form", "basic", value=b"", kind=FORM),
    predict("bad-json-but-all-in-query", "basic", "?arg1=a&num=1&flag=1&lst=1&strict=a&url=http://example.com", "{bad"),
    predict("bad-json-and-bad-query", "basic", "?num=x", "{bad"),
    predict("query-before-json", "basic", "?num=1", {"num": 2, "arg1": "json"}),
    predict("list-from-both", "basic", "?lst=1", {"lst": [2, 3]}),
    predict("empty-query-before-json", "basic", "?arg1=", {"arg1": "json"}),
    post(
        "chunked",
        P,
        '10\r\n{"arg1": "parts"\r\n1\r\n}\r\n0\r\n\r\n',
        headers={"Transfer-Encoding": "chunked"},
    ),
    predict("gzipped-but-not-said", "basic", value=b"\x1f\x8b\x08\x00"),
    predict("gzipped-badly", "basic", value=b"not gzip", headers={"Content-Encoding": "gzip"}),
    predict("expects", "basic", value={"num": 6}, headers={"Expect": "100-continue"}),
    predict("accept-html", "basic", headers={"Accept": "text/html"}),
    predict("origin", "basic", headers={"Origin": "http://elsewhere"}),
]
FORMS = [
    urlencoded("urlencoded", "basic", "arg1=a&num=5&flag=on&lst=1&lst=2&strict=b"),
    urlencoded("urlencoded-empty", "basic", ""),
    urlencoded("urlencoded-blank", "basic", "arg1=&num="),
    urlencoded("urlencoded-plus", "basic", "arg1=a+b%2Bc"),
    urlencoded("urlencoded-utf-8", "basic", "arg1=%C3%A9é"),
    urlencoded("urlencoded-latin", "basic", "arg1=%E9"),
    urlencoded("urlencoded-not-utf-8", "basic", b"arg1=\xe9"),
    urlencoded("urlencoded-semicolon", "basic", "arg1=a;num=5"),
    urlencoded("urlencoded-nonsense", "basic", "nonsense"),
    urlencoded("urlencoded-json", "basic", '{"num": 5}'),
    urlencoded("urlencoded-data", "basic", "data=text"),
    urlencoded("urlencoded-wrong", "basic", "num=x&strict=c"),
    urlencoded("urlencoded-and-query", "basic", "num=5&arg1=form", "?num=6"),
    predict("urlencoded-charset", "basic", "", b"arg1=\xe9", kind="application/x-www-form-urlencoded; charset=latin-1"),
    predict("urlencoded-no-charset", "basic", "", b"arg1=a",
        kind="application/x-www-form-urlencoded; charset=none-such"),
    form("form-empty", "basic"),
    form("form-all", "basic", ("arg1", "a"), ("num", "5"), ("flag", "1"), ("lst", "1"), ("lst", "2"), ("strict", "b")),
    form("form-accents", "basic", ("arg1", "é世")),
    form("form-not-utf-8", "basic", ("arg1", b"\xe9")),
    form("form-typed-part", "basic", ("arg1", "a", None, "text/plain; charset=utf-8")),
    form("form-latin-part", "basic", ("arg1", b"\xe9", None, "text/plain; charset=latin-1")),
    form("form-json-part", "basic", ("arg1", '{"a": 1}', None, "application/json")),
    form("form-binary-part", "basic", ("arg1", b"\x00\xff", None, "application/octet-stream")),
    form("form-file-for-text", "basic", ("arg1", "content", "f.txt", "text/plain")),
    form("form-file-for-number", "basic", ("num", "5", "f.txt", "text/plain")),
    form("form-twice", "basic", ("arg1", "a"), ("arg1", "b")),
    form("form-wrong", "basic", ("num", "x"), ("flag", "maybe")),
    form("form-before-query", "basic", ("num", "5"), query="?num=6&arg1=query"),
    form("form-unknown", "basic", ("unknown", "5")),
    form("form-no-content", "basic", ("arg1", "")),
    predict("form-and-no-boundary", "basic", value=b"--edge--\r\n", kind="multipart/form-data"),
    predict("form-of-another-boundary", "basic", value=b"--edge--\r\n", kind="multipart/form-data; boundary=other"),
    predict("form-of-nothing", "basic", value=b"nonsense", kind=FORM),
    predict("form-without-an-end", "basic", value=parts(
        '--edge\nContent-Disposition: form-data; name="arg1"\n\ncut'), kind=FORM),
    predict("form-without-a-name", "basic", value=parts(
        "--edge\nContent-Disposition: form-data\n\nx\n--edge--\n"), kind=FORM),
    predict("form-without-a-disposition", "basic", value=parts(
        "--edge\nContent-Type: text/plain\n\nx\n--edge--\n"), kind=FORM),
    predict("form-unquoted-name", "basic", value=parts(
        "--edge\nContent-Disposition: form-data; name=arg1\n\nx\n--edge--\n"), kind=FORM),
    predict("form-quoted-boundary", "basic", value=parts(
        '--edge\nContent-Disposition: form-data; name="arg1"\n\nx\n--edge--\n'),
            kind='multipart/form-data; boundary="edge"'),
    predict("form-preamble", "basic", value=parts(
        'before\n--edge\nContent-Disposition: form-data; name="arg1"\n\nx\n--edge--\nafter\n'), kind=FORM),
    predict("form-base64", "basic", value=parts(
        '--edge\nContent-Disposition: form-data; name="arg1"\nContent-Transfer-Encoding: base64\n\naGk=\n--edge--\n'),
        kind=FORM),
    predict("form-upper", "basic", value=parts(
        '--edge\nCONTENT-DISPOSITION: FORM-DATA; NAME="arg1"\n\nx\n--edge--\n'), kind=FORM),
    predict("form-bare-line-ends", "basic", value=(
        b'--edge\nContent-Disposition: form-data; name="arg1"\n\nx\n--edge--\n'), kind=FORM),
    predict("form-mixed", "basic", value=parts(
        '--edge\nContent-Disposition: form-data; name="arg1"\n\nx\n--edge--\n'), kind="multipart/mixed; boundary=edge"),
    predict("form-of-a-form", "basic", value=parts(
        '--edge\nContent-Disposition: form-data; name="arg1"\nContent-Type: multipart/mixed; boundary=in\n\n'
        '--in\n\nx\n--in--\n\n--edge--\n'), kind=FORM),
    form("form-charset", "basic", ("_charset_", "latin-1"), ("arg1", b"\xe9")),
]  # fmt: skip
QUERIED = [predict(f"query{query}", "basic", query.partition("#")[0]) for query in QUERIES]
TRAINED = [
    post("train-json-bad", "/v2/models/basic/train/", "{bad"),
    post("train-url", "/v2/models/basic/train/?arg1=" + "x" * 100, keep={"UUID": r'"uuid": "(\w+)"'}),
    get("train-done", "/v2/models/basic/train/{UUID}", until='"status": "(?!running)'),
]

GROUPS = [
    group("documented", DOCUMENTED, models={"basic": "basic"}),
    group("queries", QUERIED, models={"basic": "basic"}),
    group("jsons", [*JSONS, *TYPES], models={"basic": "basic"}),
    group(
        "forms", [*FORMS, *TRAINED, predict("long-query", "basic", encoded(arg1="y" * 7000))], models={"basic": "basic"}
    ),
]

"""Strict analysis: all state that hooks may keep between requests is found, and none in plain handlers."""

from __future__ import annotations

import tempfile
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.server.hooks.writes import GlobalWrite, find_global_writes, parse_source, writes_in

_STATEMENTS = st.sampled_from(
    ["global a", "a = b", "a.x = sample", "a[b] = c", "for a in b: c.x = a", "del a", "b.append(a)",
     "lambda a: a.pop()", "[a for a in b]", "c = [b := 1 for a in c]", "class a:\n        b = c",
     "def b(a): a.x = 1", "a += b", "pass",
     "b = a.get(1)", "b.update(x=sample)", "metadata[0] = 1", "a = sample", "for b[0] in c: pass", "with a as b: pass"]
)  # fmt: skip
Read = Callable[..., list[GlobalWrite]]


@pytest.fixture
def read(tmp_path: Path) -> Read:
    def read_files(source: str, **beside: str) -> list[GlobalWrite]:
        for name, text in beside.items():
            path = tmp_path / f"{name.replace('__', '/')}.py"
            path.parent.mkdir(exist_ok=True)
            path.write_text(textwrap.dedent(text))
        (tmp_path / "handler.py").write_text(textwrap.dedent(source))
        return find_global_writes(tmp_path / "handler.py", roots=(tmp_path,), strict=True)

    return read_files


PREAMBLE = """
import collections, contextvars, functools, importlib, itertools, json, logging, math, operator, os, random, re, sys
import hashlib, struct, threading, types, weakref
import numpy as np
import some_library
from some_library import Box
state = {}
rows = [[1], [2]]
labels = ["a", "b"]
weights = np.array([1.0, 2.0])
logger = logging.getLogger(__name__)
box = Box()
local = threading.local()
variable = contextvars.ContextVar("v")
counter = itertools.count()
spaces = types.SimpleNamespace()
default = collections.defaultdict(list)
def make_counter():
    seen = []
    def count(x=None):
        seen.append(x)
        return seen
    return count
count = make_counter()
def generator():
    kept = None
    while True:
        kept = yield kept
kept = generator()
class Memory:
    items = []
    last = None
    def __init__(self, x=None):
        self.items.append(x)
    def keep(self, x):
        self.x = x
memory = Memory()
class Plain:
    pass
class MyError(Exception):
    pass
def remember(where, x):
    where.append(x)
def double(x, kind):
    return kind(x) * 2
def get():
    return rows
def defaults(x, seen=[]):
    seen.append(x)
    return seen
@functools.lru_cache(None)
def cached():
    return []
dispatch = {"keep": remember}
def put_one(row):
    row.append(1)
def set_item(x):
    x["X"] = "1"
def set_last(x):
    x.last = 1
import csv
pairs = zip(labels, labels)
lines = csv.reader(labels)
error = ValueError()
buffer = bytearray(4)
form = struct.Struct("4s")
digest = hashlib.sha256()
deep = [[[1]]]
filled = {}
for name in "ab":
    filled[name] = Box()
appended = []
appended.append(Box())
made = None
def make():
    global made
    made = Box()
make()
put = {}
def put_in():
    put["x"] = Box()
put_in()
original = []
by_another_name = original
by_another_name.append(Box())
given = []
def fill(x):
    x.append(Box())
fill(given)
nested = {"a": []}
nested["a"].append(Box())
words = []
for line in open("words.txt"):
    words.append(line.strip())
indices = {}
for i, word in enumerate(words):
    indices[word] = i
counts = dict(zip(words, range(3)))
total = 0
total += 3
"""

SMUGGLES = {
    "a global": "global state; state = sample",
    "an item": "state['x'] = sample",
    "an item of an item": "rows[0][0] = sample",
    "a method": "rows[0].append(sample)",
    "a method by its name": "add = rows.append; add(sample)",
    "a method by another name": "getattr(rows, 'append')(sample)",
    "a method of a type": "list.append(rows, sample)",
    "a dunder": "state.__setitem__('x', sample)",
    "a function of operator": "operator.setitem(state, 'x', sample)",
    "partial": "functools.partial(rows.append)(sample)",
    "map": "list(map(rows.append, [sample]))",
    "globals()": "globals()['x'] = sample",
    "vars()": "vars()['x'] = sample",
    "exec": "exec('state[0] = 1')",
    "eval": "eval('state.update(x=1)')",
    "__globals__": "pre_inference.__globals__['x'] = sample",
    "a function's attribute": "pre_inference.last = sample",
    "a function's defaults": "pre_inference.__defaults__ = (sample,)",
    "a mutable default": "defaults(sample)",
    "setattr": "setattr(spaces, 'x', sample)",
    "a namespace": "spaces.x = sample",
    "a class attribute": "Plain.last = sample",
    "a class attribute, from an instance": "type(Plain()).last = sample",
    "a class attribute, from a simple class": "type(MyError()).last = sample",
    "a class attribute, by setattr": "setattr(type(sample), 'last', sample)",
    "an item of a sum": "x = rows + []; x[0].append(sample)",
    "a class attribute, by __class__": "Plain().__class__.last = sample",
    "a constructor": "Memory(sample)",
    "an instance": "memory.keep(sample)",
    "an unknown object": "box.put_it(sample)",
    "an unknown object, as a function": "box(sample)",
    "an unknown object, by an operator": "box << sample",
    "an unknown object, by a comparison": "sample == box",
    "an unknown object, by an item": "box[sample]",
    "an unknown object, in a with": "with box: pass",
    "a closure": "count(sample)",
    "a generator": "kept.send(sample)",
    "next": "next(counter)",
    "threading.local": "local.x = sample",
    "contextvars": "variable.set(sample)",
    "a defaultdict that is read": "default[sample]",
    "lru_cache": "cached().append(sample)",
    "a parameter": "remember(rows[0], sample)",
    "a result": "get().append(sample)",
    "a dispatch table": "dispatch['keep'](rows, sample)",
    "a local name": "x = rows\n    y = x[0]\n    y[0] = sample",
    "a loop's name": "for x in rows: x.append(sample)",
    "unpacking": "x, y = rows\n    x.append(sample)",
    "a comprehension": "[x.append(sample) for x in rows]",
    "a list of it": "[rows][0].append(sample)",
    "a dict of it": "{'x': rows}['x'].append(sample)",
    "a local object": "o = Box(); o.x = rows; o.x.append(sample)",
    "a local list": "o = []; o.append(rows); o[0].append(sample)",
    "a shallow copy": "list(rows)[0].append(sample)",
    "an argument of a lambda": "(lambda x: x.append(sample))(rows)",
    "an inner function": "def f(x): x.append(sample)\n    f(rows)",
    "a result of a lambda": "(lambda: rows)().append(sample)",
    "a walrus": "(x := rows).append(sample)",
    "an array": "weights[0] = sample",
    "an array, in place": "w = weights; w += sample",
    "an array's view": "weights.reshape(1, 2)[0] = sample",
    "an array's view by numpy": "np.asarray(weights)[0] = sample",
    "an array's T": "weights.T[0] = sample",
    "out=": "np.add(sample, 1, out=weights)",
    "copyto": "np.copyto(weights, sample)",
    "shuffle": "random.shuffle(rows)",
    "metadata": "metadata['x'] = sample",
    "signature": "signature.append(sample)",
    "nested metadata": "metadata['a']['b'].update(x=sample)",
    "a logger": "logger.x = sample",
    "a logger's handlers": "logger.addHandler(sample)",
    "a thread": "threading.Thread(target=print).start()",
    "weakref": "weakref.ref(sample)",
    "an unknown name": "not_there(sample)",
    "a class statement": "class Local(Memory): pass",
    "a match": "match sample:\n        case Memory(): pass",
    "del": "del state['x']",
    "a mutator that is no call": "f = rows.sort",
    "a decorator": "@dispatch['keep']\n    def f(): pass",
    "an iterator": "iter(rows)",
    "an iterator that is used up": "for x in pairs: break",
    "rows of a file that are used up": "for x in lines: break",
    "a pattern": "match rows:\n        case [x, *_]: x.append(sample)",
    "a target in a comprehension": "[0 for state['x'] in [sample]]",
    "a note on an exception": "error.add_note(sample)",
    "a bytearray": "remember(buffer, sample)",
    "a bytearray, by a form": "form.pack_into(buffer, 0, sample)",
    "a hash": "digest.update(sample)",
    "a hash, by a local name": "update = digest.update; update(sample)",
    "a lambda that is called with it": "list(map(lambda r: r.append(sample), rows))",
    "a lambda that sorts": "sorted(rows, key=lambda r: r.append(sample))",
    "a lambda in reduce": "functools.reduce(lambda a, b: a.append(b), [rows, sample])",
    "an inner function in map": "def own(r): r.append(sample)\n    list(map(own, rows))",
    "a function in map": "list(map(put_one, rows))",
    "a method of a local list": "own = []; list(map(own.append, rows)); own[0].append(sample)",
    "a function of numpy with a function": "np.apply_along_axis(put_one, 0, weights)",
    "a library's object, given away": "set_item(os.environ)",
    "a module, given away": "set_last(json)",
    "a module, by a local name, given away": "m = json; set_last(m)",
    "a logger of another name": "logging.getLogger('x').last = sample",
    "a sum": "sum(deep, [])[0].append(sample)",
    "a default of get": "{}.get('x', rows).append(sample)",
    "an object that was put in by a loop": "filled['a'].encode(sample)",
    "an object that was appended": "appended[0].encode(sample)",
    "an object that a function has made": "made.encode(sample)",
    "an object that a function has put in": "put['x'].encode(sample)",
    "an object that was put in by another name": "original[0].encode(sample)",
    "an object that another function was given": "given[0].encode(sample)",
    "an object deep inside": "nested['a'][0].encode(sample)",
    "a list that stands in a new one": "[sample, rows][1].append(sample)",
    "a list that a new one is named by": "pair = [sample, rows]; pair[1].append(sample)",
    "one of two": "(rows if sample else labels).append(sample)",
    "one of two objects": "(box if sample else memory).keep(sample)",
    "the other of two": "(sample or rows).append(sample)",
    "one of two of two kinds": "(box if sample else rows).append(sample)",
}  # fmt: skip

PROCESS_WIDE = {
    "a module's attribute": "json.last = sample",
    "a library's attribute": "some_library.last = sample",
    "a library's setter": "some_library.set_value(sample)",
    "environment variables": "os.environ['X'] = sample",
    "putenv": "os.putenv('X', sample)",
    "sys": "sys.modules['x'] = sample",
    "importlib": "importlib.import_module('state').x = sample",
    "__import__": "__import__('state').x = sample",
    "a seed": "np.random.seed(sample)",
    "random's seed": "random.seed(sample)",
    "torch's seed": "some_library.manual_seed(sample)",
    "exec": "exec(sample)",
    "builtins": "__builtins__.x = sample",
    "a module, by another name": "m = json; m.last = sample",
    "an import of its own": "import json as m; m.last = sample",
}

ON_DISK = {
    "a file": "open('/tmp/x', 'w').write(sample)",
    "a file, by mode": "open('/tmp/x', mode='ab')",
    "a file, by a mode that is not said": "open('/tmp/x', sample)",
    "numpy": "np.save('/tmp/x', sample)",
    "a Path": "from pathlib import Path; Path('x').write_text(sample)",
    "a folder": "os.mkdir(sample)",
    "an array": "np.zeros(3).tofile('x')",
    "a Path that is opened": "from pathlib import Path; Path('x').open('w')",
    "a file of a library": "some_library.File('x', 'w')",
    "a temporary file that stays": "import tempfile; tempfile.NamedTemporaryFile(delete=False)",
    "an archive": "import zipfile; zipfile.ZipFile('x', mode='a')",
}


@pytest.mark.parametrize("way", SMUGGLES)
@pytest.mark.parametrize("hook", ["pre_inference(sample", "post_inference(prediction"])
def test_every_way_a_hook_can_keep_state_is_found(read: Read, way: str, hook: str) -> None:
    name = "sample" if "sample" in hook else "prediction"
    body = SMUGGLES[way].replace("sample", name).replace("pre_inference", hook.partition("(")[0])

    assert read(f"{PREAMBLE}\ndef {hook}, signature, metadata):\n    {body}\n") != []


@pytest.mark.parametrize("way", PROCESS_WIDE)
def test_writes_that_affect_the_whole_process_have_process_or_machine_reach(read: Read, way: str) -> None:
    found = read(f"{PREAMBLE}\ndef pre_inference(sample, metadata):\n    {PROCESS_WIDE[way]}\n")

    assert {"process", "machine"} & {write.reach for write in found}


@pytest.mark.parametrize("way", ON_DISK)
def test_writes_to_disk_have_machine_reach(read: Read, way: str) -> None:
    found = read(f"{PREAMBLE}\ndef pre_inference(sample, metadata):\n    {ON_DISK[way]}\n")

    assert "machine" in {write.reach for write in found}


READS = [
    "return labels[sample['id']]",
    "return {'label': labels[0], 'all': labels, 'probability': float(sample[0])}",
    "return labels",
    "return [labels[i] for i in np.argsort(sample)[::-1][:5]]",
    "return state.get(sample, 'none')",
    "return {labels[i]: float(x) for i, x in enumerate(sample)}",
    "return dict(zip(labels, sample))",
    "return (np.array(sample) - weights) / weights",
    "x = np.array(sample, dtype=np.float32)\n    x -= weights\n    x[0] = 1\n    return x.reshape(-1)",
    "x = []\n    x.append(sample)\n    x.sort()\n    return x",
    "logger.info('got %s', sample); print(sample)",
    "if sample not in labels: raise MyError('no such label')",
    "if sample is None: raise ValueError(f'one of {labels}')",
    "return signature[0].name, signature[0].shape",
    "return metadata['labels'][sample]",
    "return metadata.get('threshold', 0.5) < sample",
    "return math.exp(sample), json.dumps(labels), re.sub('a', 'b', sample)",
    "return words[0], indices[sample], counts.get(sample), total + 1",
    "return len(rows), rows[0][0], rows[sample][0] + 1",
    "return ', '.join(labels)",
    "return ', '.join(sorted(labels)), sorted(labels, key=lambda x: -len(x)), list(map(str.upper, labels))",
    "return some_library.resize(sample, Box.LINEAR, np.float32), double(sample, np.float32)",
    "return sample.astype(np.float32).resize((2, 2), some_library.NEAREST)",
    "x = some_library.decode(sample); x.y = 1; x.update(labels=1); return x.run(sample)",
    "x = Box(sample); return x.value",
    "for label in labels: print(label)",
    "total = 0\n    for row in rows: total = total + row[0]\n    return total",
    "def own(x): return x * 2\n    return own(sample)",
    "return max(labels, key=len), min(rows), sum(weights)",
    "return os.environ.get('X'), os.environ['X'], os.path.join('a', 'b')",
    "import base64, io\n    return io.BytesIO(base64.b64decode(sample)).read()",
    "with open('labels.txt') as file: return file.read().split()",
    "try: return int(sample)\n    except (ValueError, TypeError) as error: return str(error)",
    "return np.dot(weights, sample), weights.dot(sample), weights @ sample, weights.mean()",
    "return type(sample).__name__, type(sample) == dict, isinstance(sample, (int, Plain)), getattr(sample, 'x', 0)",
    "print(type(sample), str(type(sample)), '{}'.format(type(sample)), f'{type(sample)}', '%s' % type(sample))",
    "return (np.array(sample) - deep[0]) / deep[0]",
    "x = sample if sample else labels\n    return x[0]",
    "match sample:\n        case {'a': x}: return x\n        case _: return labels[0]",
]  # fmt: skip


@pytest.mark.parametrize("body", READS)
def test_no_write_is_found_in_a_hook_that_only_reads_globals(read: Read, body: str) -> None:
    assert read(f"{PREAMBLE}\ndef pre_inference(sample, signature, metadata):\n    {body}\n") == []


HANDLERS = {
    "iris of xgboost, the later generation": (
        """
        labels = ["iris-setosa", "iris-versicolor", "iris-virginica"]
        def pre_inference(sample, signature, metadata):
            return {
                signature[0].name: [
                    sample["sepal_length"], sample["sepal_width"], sample["petal_length"], sample["petal_width"],
                ]
            }
        def post_inference(prediction, signature, metadata):
            predicted_class_id = prediction[0][0]
            return labels[predicted_class_id]
        """,
        "",
    ),
    "iris of pytorch, the earlier generation": (
        """
        import numpy as np
        iris_labels = ["iris-setosa", "iris-versicolor", "iris-virginica"]
        def pre_inference(sample, metadata):
            return {metadata[0].name: [sample["sepal_length"], sample["sepal_width"]]}
        def post_inference(prediction, metadata):
            probabilities = prediction[0][0]
            predicted_class_id = int(np.argmax(probabilities))
            return {
                "class_label": iris_labels[predicted_class_id],
                "class_index": predicted_class_id,
                "probabilities": probabilities,
            }
        """,
        "",
    ),
    "iris of keras, with a mean and a deviation": (
        """
        import numpy as np
        labels = ["iris-setosa", "iris-versicolor", "iris-virginica"]
        mean, deviation = [5.8, 3.0, 3.7, 1.2], [0.8, 0.4, 1.8, 0.8]
        def pre_inference(sample, signature, metadata):
            values = [sample["sepal_length"], sample["sepal_width"], sample["petal_length"], sample["petal_width"]]
            return [(value - mean[i]) / deviation[i] for i, value in enumerate(values)]
        def post_inference(prediction, signature, metadata):
            return labels[np.argmax(prediction)]
        """,
        "",
    ),
    "iris of scikit-learn, with a mean and a deviation from a bucket": (
        """
        import numpy as np
        import boto3
        import json
        labels = ["iris-setosa", "iris-versicolor", "iris-virginica"]
        s3 = boto3.client("s3")
        scalars = json.loads(s3.get_object(Bucket="b", Key="scalars.json")["Body"].read().decode("utf-8"))
        print("downloaded scalars: {}".format(scalars))
        def pre_inference(sample, metadata):
            x = np.array([sample["sepal_length"], sample["sepal_width"], sample["petal_length"], sample["petal_width"]])
            return (x - scalars["mean"]) / scalars["stddev"]
        def post_inference(prediction, metadata):
            return labels[prediction[0][0]]
        """,
        "",
    ),
    "iris of tensorflow": (
        """
        labels = ["iris-setosa", "iris-versicolor", "iris-virginica"]
        def post_inference(prediction, signature, metadata):
            return labels[int(prediction["class_ids"][0])]
        """,
        "",
    ),
    "an image of a URL": (
        """
        import requests, json, cv2
        import numpy as np
        from PIL import Image
        from io import BytesIO
        labels = requests.get("https://example.com/labels.txt").text.split("\\n")[1:]
        table = {int(k): v for k, v in json.loads(requests.get("https://example.com/x.json").text).items()}
        MEAN = np.array([0.485, 0.456, 0.406])
        def get_url_image(url):
            image = requests.get(url, stream=True).content
            return cv2.imdecode(np.frombuffer(image, np.uint8), cv2.IMREAD_COLOR)
        def pre_inference(sample, signature, metadata):
            if "url" in sample:
                image = np.asarray(Image.open(BytesIO(requests.get(sample["url"]).content)), np.float32)
            else:
                image = get_url_image(sample["other"])
            image = cv2.resize(image, (224, 224)) / 255.0
            image -= MEAN
            return {"images": image[np.newaxis, ...]}
        def post_inference(prediction, signature, metadata):
            best = [(labels[i], table[i]) for i in np.argsort(prediction["classes"])[::-1][:5]]
            return best[0]
        """,
        "",
    ),
    "text with an encoder made by a factory of the project": (
        """
        from encoder import get_encoder
        encoder = get_encoder()
        def pre_inference(sample, signature, metadata):
            return {"context": [encoder.encode(sample["text"])]}
        def post_inference(prediction, signature, metadata):
            return {"text": encoder.decode(prediction["sample"])}
        """,
        "encoder",
    ),
    "text with a tokenizer of a library": (
        """
        from bert import tokenization, run_classifier
        import tensorflow as tf
        import tensorflow_hub as hub
        labels = ["negative", "positive"]
        with tf.Graph().as_default():
            bert_module = hub.Module("https://tfhub.dev/google/bert_uncased_L-12_H-768_A-12/1")
        tokenizer = tokenization.FullTokenizer(vocab_file="vocab.txt", do_lower_case=True)
        def pre_inference(sample, signature, metadata):
            features = run_classifier.convert_examples_to_features([sample["input"]], [0, 1], 128, tokenizer)
            return {"input_ids": features[0].input_ids}
        def post_inference(prediction, signature, metadata):
            return labels[prediction["labels"][0]]
        """,
        "tokenizer",
    ),
    "one that logs with Cortex's logger": (
        """
        from cortex.lib.log import get_logger
        logger = get_logger()
        labels = ["a", "b"]
        def pre_inference(sample, metadata):
            logger.info(sample)
            return sample["values"]
        def post_inference(prediction, metadata):
            return labels[int(prediction[0][0])]
        """,
        "",
    ),
    "scalars from S3": (
        """
        import boto3, json
        import numpy as np
        s3 = boto3.client("s3")
        scalars = json.loads(s3.get_object(Bucket="examples", Key="iris/scalars.json")["Body"].read().decode("utf-8"))
        def pre_inference(sample, metadata):
            x = np.array([sample["sepal_length"], sample["sepal_width"]])
            return (x - scalars["mean"]) / scalars["deviation"]
        """,
        "",
    ),
    "a scaler of a pickle": (
        """
        import pickle
        with open("scaler.pickle", "rb") as file:
            scaler = pickle.load(file)
        def pre_inference(sample, signature, metadata):
            return scaler.transform([sample])
        """,
        "scaler",
    ),
    "a global between the hooks": (
        """
        last = None
        def pre_inference(sample, signature, metadata):
            global last
            last = sample["id"]
            return sample["values"]
        def post_inference(prediction, signature, metadata):
            return {"id": last}
        """,
        "last",
    ),
    "functions of another module of the project": (
        """
        from text import clean
        import text
        def pre_inference(sample, signature, metadata):
            return [clean(sample), text.STOP_WORDS[0], text.length(sample)]
        """,
        "",
    ),
    "functions of another module, which remembers": (
        """
        from memory import keep
        def pre_inference(sample, signature, metadata):
            keep(sample)
        """,
        "seen",
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", HANDLERS)
def test_the_state_of_cortex_example_handlers_is_identified(read: Read, kind: str) -> None:
    source, name = HANDLERS[kind]
    found = read(
        source,
        encoder="class Encoder:\n    def encode(self, x): return x\ndef get_encoder(): return Encoder()\n",
        text="STOP_WORDS = ['a']\ndef clean(x): return [w for w in x.split() if w not in STOP_WORDS]\n"
        "def length(x): return len(x)\n",
        memory="seen = []\ndef keep(x): seen.append(x)\n",
    )

    assert {write.name for write in found} == ({name} if name else set())


def test_writes_that_hooks_cannot_reach_are_ignored(read: Read) -> None:
    source = """
        state = []
        def pre_inference(sample, metadata): return first(sample)
        def first(x): return second(x)
        def second(x): return x
        def train(): state.append(1)
        if __name__ == "__main__":
            train()
    """

    assert read(source) == []


def test_the_analysis_follows_packages_relative_imports_and_all_roots(tmp_path: Path) -> None:
    (tmp_path / "src" / "parts").mkdir(parents=True)
    (tmp_path / "handlers").mkdir()
    (tmp_path / "src" / "parts" / "__init__.py").write_text("from .deep import keep\nfrom . import deep\n")
    (tmp_path / "src" / "parts" / "deep.py").write_text(
        "kept = {}\ndef keep(x): kept['x'] = x\ndef give(x): return x\n"
    )
    (tmp_path / "handlers" / "h.py").write_text(
        "import parts\nfrom parts.deep import give\n"
        "def pre_inference(sample, metadata): return give(sample)\n"
        "def post_inference(prediction, metadata): return parts.keep(prediction)\n"
    )

    found = find_global_writes(tmp_path / "handlers" / "h.py", roots=(tmp_path, tmp_path / "src"), strict=True)

    assert found == [GlobalWrite("kept", 2, "deep.py")]


@pytest.mark.parametrize(
    "source",
    [
        "def f(sample, metadata): return sample\npre_inference = f",
        "from other import *",
        "import functools\ndef d(f): return f\n@d\ndef pre_inference(sample, metadata): return sample",
        "from nowhere_at_all import pre_inference",
        "class Pre:\n    def __call__(self, sample, metadata): return sample\npre_inference = Pre()",
        "import beside as pre_inference",
    ],
)
def test_hooks_that_are_not_plain_functions_are_reported_as_keeping_state(read: Read, source: str) -> None:
    assert read(source, beside="x = 1") != []


def test_a_module_that_cannot_be_parsed_is_reported_as_keeping_state(read: Read) -> None:
    source = "from broken import f\ndef pre_inference(sample, metadata): return f(sample)\n"

    assert [write.name for write in read(source, broken="def f(:\n")] == ["f"]


@pytest.mark.parametrize(
    "load",
    [
        "globals()['labels'] = Box()",
        "exec('labels = Box()')",
        "import sys; setattr(sys.modules[__name__], 'labels', Box())",
        "vars()['labels'] = Box()",
    ],
)
def test_names_that_are_bound_dynamically_are_reported_as_keeping_state(read: Read, load: str) -> None:
    hook = "def pre_inference(sample, metadata): return labels[0]\n"

    assert read(f"labels = ['a']\n{hook}") == []
    assert read(f"labels = ['a']\n{load}\n{hook}") != []


def test_an_unknown_object_that_another_module_stores_in_a_global_is_found(read: Read) -> None:
    source = (
        "import config\nimport other\ndef pre_inference(sample, metadata): return config.table['a'].encode(sample)\n"
    )

    assert read(source, config="table = {'a': 'b'}", other="x = 1") == []
    assert read(source, config="table = {'a': 'b'}", other="import config\nconfig.table['a'] = x()") != []


@settings(max_examples=50)
@given(st.lists(_STATEMENTS, min_size=1, max_size=6))
def test_the_strict_analysis_finds_every_function_that_the_plain_one_finds(statements: list[str]) -> None:
    body = "".join(f"    {statement}\n" for statement in statements)
    source = f"a = b = c = {{}}\ndef pre_inference(sample, metadata):\n{body}"
    try:
        compile(source, "hooks.py", "exec")
    except SyntaxError:
        return
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "hooks.py").write_text(source)

        assert not writes_in(parse_source(source)) or find_global_writes(Path(folder) / "hooks.py", strict=True)


def test_a_pickled_handler_is_reported_as_keeping_state(tmp_path: Path) -> None:
    assert [str(write) for write in find_global_writes(tmp_path / "handler.pickle", strict=True)] != []

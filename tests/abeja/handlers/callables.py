"""All kinds of callables as handlers."""

import functools


def answer(request, context):
    return {"content": [request["http_method"], ":", type(context).__name__]}


class Instance:
    def __call__(self, request, context):
        return answer(request, context)

    def method(self, request, context):
        return answer(request, context)

    @staticmethod
    def static(request, context):
        return answer(request, context)

    @classmethod
    def of_class(cls, request, context):
        return answer(request, context)


class Made(dict):
    """A class is called as any callable is: what it makes is the answer."""

    def __init__(self, request, context):
        super().__init__(content="made of " + request["http_method"])


class MadeOfNothing:
    def __init__(self, request, context):
        pass


instance = Instance()
method = instance.method
static = Instance.static
of_class = Instance.of_class
partial = functools.partial(lambda more, request, context: answer(request, context), 5)
anonymous = lambda request, context: answer(request, context)  # noqa: E731
cached = functools.lru_cache(maxsize=None)(lambda: None)
not_callable = {"content": "x"}
nothing = None


def other_names(req, ctx):
    return answer(req, ctx)


def one(request):
    return answer(request, {})


def three(request, context, more):
    return answer(request, context)


def three_with_default(request, context, more=1):
    return answer(request, context)


def many(*args):
    return answer(*args)


def keywords(**named):
    return {"content": "x"}


def only_keywords(*, request, context):
    return {"content": "x"}


async def awaited(request, context):
    return answer(request, context)


def generated(request, context):
    yield answer(request, context)


async def generated_awaited(request, context):
    yield answer(request, context)


def wrapper(function):
    @functools.wraps(function)
    def wrapped(request, context):
        result = function(request, context)
        result["content"].append("!")
        return result

    return wrapped


@wrapper
def decorated(request, context):
    return answer(request, context)


class Counting:
    """Handlers are loaded once, and keep what they keep."""

    def __init__(self):
        self.calls = 0

    def __call__(self, request, context):
        self.calls += 1
        context["calls"] = context.get("calls", 0) + 1
        return {"content": {"calls": self.calls, "context": context}}


counting = Counting()

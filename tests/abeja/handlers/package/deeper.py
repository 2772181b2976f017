"""A handler of a package."""


def handler(request, context):
    return {"content": __name__}

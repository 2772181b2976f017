"""Modules that are not ready to serve."""

from webargs import fields


class Failing:
    @staticmethod
    def warm():
        raise ValueError("it is cold")


class Later:
    @staticmethod
    def warm():
        raise NotImplementedError


class ArgsFail:
    @staticmethod
    def get_predict_args():
        raise ValueError("no arguments")


class ArgsOfList:
    @staticmethod
    def get_predict_args():
        return [fields.Str()]


class ArgsOfTexts:
    @staticmethod
    def get_predict_args():
        return {"a": "text"}

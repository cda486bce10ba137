from enum import Enum

registered: dict["AttentionBackendEnum", str] = {}


class AttentionBackendEnum(Enum):
    CUSTOM = None


def register_backend(backend, class_path=None):
    registered[backend] = class_path

"""The loader of tritonclient's generated modules."""

from __future__ import annotations

import subprocess
import sys

from penstock.server.protobuf import model_config_pb2, service_pb2


def run(program: str) -> None:
    subprocess.run([sys.executable, "-c", program], check=True)


def test_modules_are_loaded_once_and_share_their_messages() -> None:
    assert service_pb2() is service_pb2()
    config = model_config_pb2().ModelConfig(name="m")
    assert service_pb2().ModelConfigResponse(config=config).config.name == "m"


def test_grpcio_is_not_imported_and_importing_tritonclient_later_reuses_the_messages() -> None:
    run(
        "import sys\n"
        "from penstock.server.protobuf import service_pb2\n"
        "mine = service_pb2()\n"
        "assert 'grpc' not in sys.modules and 'tritonclient.grpc' not in sys.modules\n"
        "import tritonclient.grpc\n"
        "assert tritonclient.grpc.service_pb2 is mine\n"
    )


def test_messages_of_an_earlier_tritonclient_import_are_reused() -> None:
    run(
        "import tritonclient.grpc\n"
        "from penstock.server.protobuf import model_config_pb2, service_pb2\n"
        "assert service_pb2() is tritonclient.grpc.service_pb2\n"
        "assert model_config_pb2() is tritonclient.grpc.model_config_pb2\n"
    )


def test_the_rpc_modules_do_not_import_grpcio() -> None:
    run("import sys\nimport penstock.server.v2.rpc.services\nassert 'grpc' not in sys.modules\n")

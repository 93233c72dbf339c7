from mmserve.config.settings import Settings
from mmserve.logs.banner import start_banner


def test_the_banner_lists_what_multi_model_server_lists() -> None:
    text = start_banner(
        Settings(model_store="/models", load_models="m=m.mar"),
        home="/opt/mmserve",
        directory="/home/x",
        temp="/tmp",
        python="/usr/bin/python3",
        config_file=None,
        gpus=0,
        cpus=2,
    )
    lines = text.splitlines()
    assert lines[0] == ""
    for line in (
        "Config file: N/A",
        "Inference address: http://127.0.0.1:8080",
        "Model Store: /models",
        "Initial Models: m=m.mar",
        "Number of CPUs: 2",
        "Preload model: false",
    ):
        assert line in lines


def test_the_banner_keeps_passwords_of_urls_to_itself() -> None:
    text = start_banner(
        Settings(load_models="m=https://me:secret@host/m.mar?X-Signature=secret,n=n.mar"),
        home="",
        directory="",
        temp="",
        python="",
        config_file=None,
        gpus=0,
        cpus=1,
    )
    assert "secret" not in text
    assert "Initial Models: m=https://****@host/m.mar?****,n=n.mar" in text

"""File, command line and environment meet in one function."""

import math
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mmserve.config.launch import Arguments
from mmserve.config.load import Loaded, load_settings
from mmserve.errors import ConfigurationError

PROFILE = {
    "SAGEMAKER_BIND_TO_PORT": "17777",
    "SAGEMAKER_MODEL_STORE": "/",
    "SAGEMAKER_RESPONSE_TIMEOUT": "60",
    "SAGEMAKER_NUM_MODEL_WORKERS": "2",
    "SAGEMAKER_HANDLER": "service:handle",
    "SAGEMAKER_MAX_REQUEST_SIZE": "1000",
    "SAGEMAKER_MAX_RESPONSE_SIZE": "2000",
}


@pytest.fixture
def load(tmp_path):
    """Loads what a server started in an empty folder would, with this `config.properties`."""

    def load(text: str | None = None, environ=None, **flags) -> Loaded:
        if text is not None:
            (tmp_path / "config.properties").write_text(text)
        return load_settings(Arguments(**flags), environ or {}, tmp_path, with_gpus=False)

    return load


def refusal(load, *args, **flags) -> str:
    with pytest.raises(ConfigurationError) as refused:
        load(*args, **flags)
    return str(refused.value)


# Which file


def test_without_a_file_everything_is_built_in(load):
    loaded = load()
    assert loaded.file is None
    assert loaded.settings.job_queue_size == 100
    assert set(loaded.origins.values()) - {loaded.origins["cpu_count"]} == {"built in"}
    assert loaded.warnings == loaded.notices == []


def test_the_file_is_found_by_variable_then_flag_then_folder(load, tmp_path):
    for name, size in (("by-variable", 1), ("by-flag", 2)):
        (tmp_path / name).write_text(f"job_queue_size={size}")
    variable = {"MMS_CONFIG_FILE": "by-variable"}
    folder = "job_queue_size=3"
    assert load(folder, variable, mms_config="by-flag").settings.job_queue_size == 1
    assert load(folder, mms_config=str(tmp_path / "by-flag")).settings.job_queue_size == 2
    assert load(folder).settings.job_queue_size == 3
    assert load(folder, {"MMS_CONFIG_FILE": ""}).settings.job_queue_size == 3


def test_a_file_that_is_named_and_missing_is_an_error(load):
    said = refusal(load, environ={"MMS_CONFIG_FILE": "/nowhere/c.properties"})
    assert "/nowhere/c.properties (MMS_CONFIG_FILE) cannot be read: No such file" in said
    assert "gone (--mms-config) cannot be read" in refusal(load, mms_config="gone")
    assert "cannot be read" in refusal(load, mms_config="a\0b")


def test_a_folder_in_place_of_a_file_is_an_error(load, tmp_path):
    assert "is a directory" in refusal(load, mms_config=str(tmp_path))
    (tmp_path / "config.properties").mkdir()
    assert "is a directory" in refusal(load)


def test_a_device_is_no_configuration_file(load):
    assert "more than 1048576 bytes" in refusal(load, mms_config="/dev/zero")


def test_a_syntax_error_has_file_and_line(load):
    assert refusal(load, "\na=\\u12").startswith("config.properties, line 2: ")


# Who wins


LAYERS = ["file", "flag", "variable"]


@given(layers=st.sets(st.sampled_from(LAYERS)), is_on=st.booleans())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_the_last_layer_that_speaks_wins(tmp_path, layers, is_on):
    lines = [f"enable_envvars_config={is_on}"]
    lines += ["model_store=file"] if "file" in layers else []
    (tmp_path / "config.properties").write_text("\n".join(lines))
    arguments = Arguments(model_store="flag" if "flag" in layers else None)
    environ = {"MMS_MODEL_STORE": "variable"} if "variable" in layers else {}
    counting = [each for each in LAYERS if each in layers and (is_on or each != "variable")]

    loaded = load_settings(arguments, environ, tmp_path, with_gpus=False)

    assert loaded.settings.model_store == (counting[-1] if counting else None)
    assert loaded.origins["model_store"] == {
        "file": "config.properties, line 2",
        "flag": "--model-store",
        "variable": "MMS_MODEL_STORE",
    }.get(counting[-1] if counting else "", "built in")


def test_a_variable_beats_the_models_flag(load):
    environ = {"MMS_LOAD_MODELS": "b=b.mar"}
    loaded = load("enable_envvars_config=true", environ, models="a=a.mar")
    assert loaded.settings.load_models == "b=b.mar"


def test_the_switch_for_variables_is_only_in_the_file(load):
    environ = {"MMS_ENABLE_ENVVARS_CONFIG": "true", "MMS_JOB_QUEUE_SIZE": "7"}
    loaded = load("", environ)
    assert loaded.settings.job_queue_size == 100
    assert [warning.partition(" ")[0] for warning in loaded.warnings] == sorted(environ)


def test_our_own_keys_and_upper_case_ones_have_variables_too(load):
    environ = {"MMS_NUM_WORKERS": "3", "MMS_BATCH_POLICY": "fill"}
    loaded = load("enable_envvars_config=TRUE", environ)
    assert (loaded.settings.num_workers, loaded.settings.batch_policy) == (3, "fill")


def test_log_folders_always_follow_their_variables(load, tmp_path):
    environ = {"LOG_LOCATION": "l", "METRICS_LOCATION": "m"}
    loaded = load("log_location=elsewhere", environ)
    assert (loaded.settings.log_location, loaded.settings.metrics_location) == ("l", "m")
    assert loaded.origins["log_location"] == "LOG_LOCATION"
    assert load("", {"LOG_LOCATION": ""}).settings.log_location == "logs"


# Variables in the file


def test_a_variable_in_a_value_is_replaced_wherever_it_stands(load):
    text = "inference_address=http://$$HOST_NAME$$:$$PORT$$\nmodel_store=$$PORT$$$$PORT$$"
    loaded = load(text, {"HOST_NAME": "h", "PORT": "17"})
    assert loaded.settings.inference_address == "http://h:17"
    assert loaded.settings.model_store == "1717"


def test_a_variable_that_is_not_set_stops_the_start(load):
    said = refusal(load, "\nmodel_store=$$NO_SUCH$$")
    assert said.startswith("Invalid Environment Variable NO_SUCH: model_store")
    assert "line 2" in said


def test_what_is_no_variable_stays(load):
    text = "model_store=$$$$ $$A$$ $A$"
    assert load(text).settings.model_store == "$$$$ $$A$$ $A$"


def test_a_value_from_the_environment_is_taken_as_it_is(load):
    environ = {"MMS_MODEL_STORE": "$$HOME$$"}
    loaded = load("enable_envvars_config=true", environ)
    assert loaded.settings.model_store == "$$HOME$$"


# Wrong values


@pytest.mark.parametrize("value", ["0", "-1", "abc", ""])
def test_a_wrong_value_names_key_value_place_and_what_is_allowed(load, value):
    assert refusal(load, f"#\njob_queue_size={value}") == (
        f"job_queue_size={value} (config.properties, line 2): "
        "it must be a whole number of requests, at least 1"
    )


def test_a_wrong_value_of_a_variable_names_the_variable(load):
    environ = {"MMS_MAX_REQUEST_SIZE": "10MB"}
    said = refusal(load, "enable_envvars_config=true", environ)
    assert said.startswith("max_request_size=10MB (MMS_MAX_REQUEST_SIZE): it must be")


def test_a_wrong_address_names_key_and_value(load):
    said = refusal(load, "inference_address=127.0.0.1:8080")
    assert said.startswith("inference_address=127.0.0.1:8080 (config.properties, line 1): ")
    assert "http://HOST[:PORT]" in said


def test_a_secret_is_not_in_the_message(load):
    said = refusal(load, "keystore_pass=hunter2\\u0007")
    assert "keystore_pass=****" in said
    assert "hunter2" not in said


# Unknown and idle keys


@pytest.mark.parametrize(
    ("line", "hint"),
    [
        ("job_queue_sise=1", "did you mean job_queue_size?"),
        ("enable_env_vars_config=true", "it is spelled enable_envvars_config"),
        ("install_py_dep_per_model=true", "nothing is installed at run time"),
        ("default_startup_timeout=9", "load_timeout_seconds"),
        ("grpc_inference_port=7070", "there is no gRPC here"),
        ("qqqq=1", "qqqq (config.properties, line 1) is unknown and ignored"),
        ("=1", "a line without a key"),
    ],
)
def test_an_unknown_key_is_a_warning_with_what_may_be_meant(load, line, hint):
    (warning,) = load(line).warnings
    assert hint in warning


def test_keys_of_the_jvm_are_named_once(load):
    loaded = load("vmargs=-Xmx1g\nasync_logging=true\nplugins_path=/p\nvmargs=-Xmx2g")
    (notice,) = loaded.notices
    assert "async_logging, plugins_path, vmargs" in notice
    assert loaded.warnings == []


def test_a_log4j_file_is_named_as_not_read(load):
    (notice,) = load(log_config="/etc/log4j2.xml").notices
    assert "/etc/log4j2.xml" in notice


def test_a_mistyped_variable_is_a_warning_and_a_foreign_one_is_not(load):
    environ = {"MMS_JOB_QUEUE_SISE": "1", "MMS_SERVICE_PORT_8080_TCP": "x"}
    (warning,) = load("enable_envvars_config=true", environ).warnings
    assert warning == "MMS_JOB_QUEUE_SISE is unknown and ignored; did you mean MMS_JOB_QUEUE_SIZE?"


@pytest.mark.parametrize(
    ("text", "doubt"),
    [
        ("debug=yes", "read as false"),
        ("model_store=/no/such/folder", "is no directory"),
        ("load_models=ALL", "without model_store"),
        ("certificate_file=c.pem", "only together"),
        ("management_address=http://0.0.0.0:8081", "management_token_file"),
    ],
)
def test_what_is_probably_not_meant_is_a_warning(load, text, doubt):
    (warning,) = load(text).warnings
    assert doubt in warning


# SageMaker


def test_the_sagemaker_profile_takes_its_values_from_the_environment(load):
    loaded = load(environ=PROFILE, mms_config="sagemaker")
    found = loaded.settings
    assert found.inference_address == found.management_address == "http://0.0.0.0:17777"
    assert found.management.same_listener(found.inference)
    assert (found.model_store, found.default_service_handler) == ("/", "service:handle")
    assert (found.default_response_timeout, found.unregister_model_timeout) == (60, 60)
    assert (found.max_request_size, found.max_response_size) == (1000, 2000)
    assert (found.default_workers_per_model, found.decode_input_request) == (2, False)
    assert loaded.origins["model_store"].startswith("sagemaker, line ")
    assert loaded.warnings == []


@pytest.mark.parametrize("missing", PROFILE)
def test_every_variable_of_the_profile_must_be_set(load, missing):
    environ = {name: value for name, value in PROFILE.items() if name != missing}
    assert missing in refusal(load, environ=environ, mms_config="sagemaker")


def test_the_profile_takes_the_payload_size_of_batch_transform(load):
    environ = {k: v for k, v in PROFILE.items() if k != "SAGEMAKER_MAX_REQUEST_SIZE"}
    environ["SAGEMAKER_MAX_PAYLOAD_IN_MB"] = "10"
    loaded = load(environ=environ, mms_config="sagemaker")
    assert loaded.settings.max_request_size == 10 * 1024 * 1024


@pytest.mark.parametrize(("multi_model", "ping_mode"), [("true", "live"), ("false", "ready")])
def test_some_defaults_differ_on_sagemaker(load, multi_model, ping_mode):
    loaded = load(environ={"SAGEMAKER_MULTI_MODEL": multi_model})
    assert loaded.settings.ping_mode == ping_mode
    assert loaded.settings.log_to == "stdout"
    assert loaded.settings.queue_wait_s == 55
    assert loaded.origins["log_to"] == "default on SageMaker"


def test_a_file_wins_over_the_defaults_on_sagemaker(load):
    loaded = load("ping_mode=mms\nlog_to=files", {"SAGEMAKER_MULTI_MODEL": "true"})
    assert (loaded.settings.ping_mode, loaded.settings.log_to) == ("mms", "files")


@pytest.mark.parametrize(
    ("text", "is_odd"),
    [
        ("cors_allowed_origin=*", True),
        ("cors_allowed_origin=*\nmanagement_token_file=token", False),
        ("cors_allowed_origin=http://ui.example", False),
    ],
)
def test_management_open_to_every_web_page_is_warned_of(load, text, is_odd):
    warnings = load(text).warnings
    assert [w for w in warnings if "every web page" in w] == (warnings if is_odd else [])


# The machine


def nvidia_smi(folder: Path, script: str) -> dict[str, str]:
    folder.mkdir()
    tool = folder / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\n{script}\n")
    tool.chmod(0o755)
    return {"PATH": f"{folder}:/usr/bin:/bin"}


@pytest.mark.parametrize(
    ("text", "variable", "count", "origin"),
    [
        ("", None, 4, "nvidia-smi"),
        ("number_of_gpu=2", None, 2, "config.properties, line 2"),
        ("number_of_gpu=9", None, 4, "nvidia-smi"),
        ("number_of_gpu=0", None, 0, "config.properties, line 2"),
        ("number_of_gpu=1", "9", 9, "MMS_NUMBER_OF_GPU"),
    ],
)
def test_gpus_are_those_that_are_there_but_for_the_variable(
    tmp_path, text, variable, count, origin
):
    environ = nvidia_smi(tmp_path / "bin", "for i in 0 1 2 3; do echo $i; done")
    environ |= {"MMS_NUMBER_OF_GPU": variable} if variable else {}
    (tmp_path / "config.properties").write_text("enable_envvars_config=true\n" + text)

    loaded = load_settings(Arguments(), environ, tmp_path)

    assert loaded.settings.number_of_gpu == count
    assert loaded.origins["number_of_gpu"] == origin
    assert len(loaded.warnings) == (1 if "9" in text else 0)


def test_nvidia_smi_is_left_alone_where_its_answer_would_not_count(tmp_path):
    environ = nvidia_smi(tmp_path / "bin", f"touch {tmp_path}/called; echo 0")
    (tmp_path / "config.properties").write_text("number_of_gpu=0")
    load_settings(Arguments(), environ, tmp_path)
    assert not (tmp_path / "called").exists()


def test_workers_at_start_are_counted_by_key_then_gpus_then_cpus(load):
    text = "number_of_gpu=3\nNUM_WORKERS=2\ndefault_workers_per_model=1"
    lines = text.split("\n")
    cpus = load("").settings.cpu_count
    assert load("\n".join(lines)).settings.startup_workers == 1
    assert load("\n".join(lines[:2])).settings.startup_workers == 2
    assert load(lines[0]).settings.startup_workers == 3
    assert load("").settings.startup_workers == cpus >= 1


def test_logs_go_to_standard_output_where_the_folder_cannot_be_made(load, tmp_path):
    (tmp_path / "file").touch()
    loaded = load("", {"LOG_LOCATION": str(tmp_path / "file/logs")})
    assert loaded.settings.log_to == "stdout"
    assert "cannot be written" in loaded.origins["log_to"]


# Effective values


def test_seconds_win_over_minutes(load):
    assert load("default_response_timeout=2").settings.response_timeout_s == 120
    assert load("default_response_timeout_seconds=0").settings.response_timeout_s == 0
    assert load("default_response_timeout_seconds=-1").settings.response_timeout_s == 7200


def test_a_load_may_take_as_long_as_a_batch_but_at_least_two_minutes(load):
    assert load("default_response_timeout_seconds=4").settings.load_timeout_s == 120
    assert load("default_response_timeout=3").settings.load_timeout_s == 180
    assert load("load_timeout_seconds=5").settings.load_timeout_s == 5


def test_debugging_knows_no_time_limits_and_one_worker(load):
    text = "default_response_timeout_seconds=1\nload_timeout_seconds=1\nNUM_WORKERS=4\n"
    settings = load(text + "debug=true").settings
    assert settings.response_timeout_s == settings.load_timeout_s == math.inf
    assert settings.queue_wait_s == math.inf
    assert settings.startup_workers == 1
    assert load(text).settings.startup_workers == 4

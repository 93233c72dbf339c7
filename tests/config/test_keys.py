"""The keys: what each allows, and that the table is whole."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmserve.config.keys import FOREIGN_KEYS, JVM_KEYS, KEYS
from mmserve.config.settings import Settings

NUMBERS = [key for key in KEYS.values() if key.type in (int, float)]


@pytest.mark.parametrize("key", KEYS.values(), ids=lambda key: key.name)
def test_every_default_is_read_back_from_its_own_spelling(key):
    assert key.read(key.written(key.default)) == key.default


@pytest.mark.parametrize("key", KEYS.values(), ids=lambda key: key.name)
def test_every_key_says_what_it_does_and_every_number_has_a_unit(key):
    assert key.description.endswith(".")
    assert bool(key.unit) == (key in NUMBERS)


def test_every_field_is_a_key_but_what_is_found_out():
    assert {key.field for key in KEYS.values()} == set(Settings.__struct_fields__) - {"cpu_count"}


def test_no_key_is_of_two_kinds():
    assert not KEYS.keys() & JVM_KEYS
    assert not KEYS.keys() & FOREIGN_KEYS.keys()
    assert not JVM_KEYS & FOREIGN_KEYS.keys()


def refusal(name: str, text: str) -> str:
    with pytest.raises(ValueError) as refused:
        KEYS[name].read(text)
    return str(refused.value)


@pytest.mark.parametrize("text", ["abc", "", "-1", "0", "1.5", "10MB", "1e7", "1_0", "٣", "9" * 30])
def test_a_size_is_a_positive_whole_number(text):
    assert refusal("max_request_size", text) == "a whole number of bytes, at least 1"


@pytest.mark.parametrize(
    ("text", "value"), [("7", 7), (" 7 ", 7), ("+7", 7), ("007", 7), ("2147483648", 2**31)]
)
def test_blanks_around_a_number_do_not_matter(text, value):
    assert KEYS["max_request_size"].read(text) == value


@pytest.mark.parametrize("text", ["nan", "inf", "1e3", "-1", "0", "1.2.3", "."])
def test_a_time_limit_is_a_plain_number(text):
    assert "a number of seconds, above 0" in refusal("idle_timeout_seconds", text)


def test_a_time_limit_may_have_a_fraction():
    assert KEYS["idle_timeout_seconds"].read("0.25") == 0.25
    assert KEYS["idle_timeout_seconds"].read(".5") == 0.5


def test_empty_means_not_set_only_where_that_is_a_value():
    assert KEYS["model_store"].read("") is None
    assert KEYS["worker_max_requests"].read(" ") is None
    assert refusal("job_queue_size", "")


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("debug", "true", True),
        ("debug", "TRUE ", True),
        ("debug", "yes", False),
        ("debug", "", False),
        ("decode_input_request", "true", True),
        ("decode_input_request", "True", False),
        ("preload_model", "Yes", True),
        ("preload_model", "1", True),
        ("preload_model", "N", False),
    ],
)
def test_truth_is_spelled_as_multi_model_server_reads_it(name, text, value):
    assert KEYS[name].read(text) is value


def test_preload_model_takes_no_other_word():
    assert refusal("preload_model", "maybe") == "yes or no, true or false"


@pytest.mark.parametrize(
    ("name", "text", "is_odd"),
    [
        ("debug", "yes", True),
        ("decode_input_request", "True", True),
        ("debug", "False", False),
        ("debug", "true", False),
        ("allowed_urls", "https://a/.*,https://b/.*", True),
        ("allowed_urls", "https://a/x{1,2}", False),
        ("job_queue_size", "1", False),
    ],
)
def test_a_value_that_may_surprise_is_said_to(name, text, is_odd):
    assert bool(KEYS[name].doubt(text)) == is_odd


def test_a_choice_names_its_options():
    assert KEYS["batch_policy"].read(" FILL ") == "fill"
    assert refusal("batch_policy", "lazy") == "one of auto, fill, immediate"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("blacklist_env_vars", "AWS_(.*"),
        ("allowed_urls", "*"),
        ("cors_allowed_origin", "a\r\nset-cookie: x=1"),
        ("cors_allowed_origin", "é"),
        ("preload_imports", "torch, os.system('x')"),
        ("preload_imports", "torch torchvision"),
        ("preload_imports", ""),
        ("allowed_url_schemes", "HTTP"),
        ("model_store", "a\0b"),
        ("inference_address", "8080"),
    ],
)
def test_text_of_the_wrong_form_is_refused(name, text):
    assert refusal(name, text)


def test_blanks_in_a_list_do_not_matter():
    assert KEYS["preload_imports"].read(" torch, a.b:C ") == "torch,a.b:C"
    assert KEYS["allowed_url_schemes"].read("https , s3") == "https,s3"


def test_trailing_blanks_of_text_stay():
    assert KEYS["model_store"].read("/models ") == "/models "


@given(key=st.sampled_from([*KEYS.values()]), text=st.text() | st.from_regex(r"[+-]?[0-9.]+"))
@settings(max_examples=400)
def test_any_text_is_read_or_refused_in_words(key, text):
    try:
        value = key.read(text)
    except ValueError as error:
        assert str(error)
        return
    key.doubt(text)
    assert key.read(key.written(value)) == value


def test_a_secret_is_not_shown():
    assert KEYS["keystore_pass"].shown("hunter2") == "****"
    assert "hunter2" not in repr(Settings(keystore_pass="hunter2"))

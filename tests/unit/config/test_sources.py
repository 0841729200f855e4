"""config.load: what wins over what, and that every mistake is one clear line."""

import pickle
import re
from pathlib import Path

import pytest

from omnidraft import config
from omnidraft.errors import ConfigError


@pytest.fixture
def toml(tmp_path: Path):
    def write(text: str) -> Path:
        path = tmp_path / "settings.toml"
        path.write_text(text)
        return path

    return write


def problem(*args, **kwargs) -> str:
    with pytest.raises(ConfigError) as refused:
        config.load(*args, **kwargs)
    return str(refused.value)


def test_the_file_wins_over_the_defaults_field_by_field(toml):
    settings = config.load(toml("[learner]\nmax_tokens = 70\n"), environ={})
    assert settings.learner.max_tokens == 70
    assert settings.learner.records_per_step == config.LearnerSettings().records_per_step


def test_the_environment_wins_over_the_file_field_by_field(toml):
    path = toml("[learner]\nmax_tokens = 70\nrecords_per_step = 9\n")
    settings = config.load(path, environ={"OMNIDRAFT_LEARNER__MAX_TOKENS": "80"})
    assert (settings.learner.max_tokens, settings.learner.records_per_step) == (80, 9)


def test_overrides_win_over_the_environment_and_none_is_not_given():
    environ = {"OMNIDRAFT_LEARNER__MAX_TOKENS": "80", "OMNIDRAFT_LEARNER__LOSS": "dm"}
    settings = config.load(environ=environ, learner={"max_tokens": 90, "loss": None})
    assert (settings.learner.max_tokens, settings.learner.loss) == (90, "dm")


def test_several_targets_come_from_the_file_or_the_environment(toml):
    path = toml("[models]\ntarget = 'a'\nmore_targets = ['b', 'c']\n")
    assert config.load(path, environ={}).models.targets == ("a", "b", "c")
    more = config.load(path, environ={"OMNIDRAFT_MODELS__MORE_TARGETS": '["d"]'})
    assert more.models.targets == ("a", "d")
    other = config.load(path, environ={"OMNIDRAFT_MODELS__TARGET": "b"})
    assert other.models.targets == ("b", "c")
    assert config.load(environ={}).models.targets == (config.ModelSettings().target,)


def test_a_precision_is_refused_where_a_gguf_file_has_one():
    said = problem(environ={}, models={"engine": "llamacpp", "precision": "int8"})
    assert "with models.engine = 'llamacpp' the GGUF file says it" in said


def test_settings_for_one_target_differ_in_nothing_else(toml):
    settings = config.load(toml("[models]\ntarget = 'a'\nmore_targets = ['b']\n[decode]\nthreads = 7\n"), environ={})
    alone = config.load(toml("[models]\ntarget = 'b'\n[decode]\nthreads = 7\n"), environ={})
    assert settings.for_target("b") == alone
    assert settings.models.targets == ("a", "b")


@pytest.mark.parametrize("text", ["", "[log]\nurl = 'sqlite:///other.db'\n[registry]\nurl = 'http://elsewhere:1'\n"])
def test_the_two_addresses_have_short_names_that_win_over_the_file(toml, text):
    environ = {"OMNIDRAFT_LOG": "kafka://broker:9092,other:9093", "MLFLOW_TRACKING_URI": "http://mlflow:5000"}
    settings = config.load(toml(text), environ=environ)
    assert settings.log.url == "kafka://broker:9092,other:9093"
    assert settings.registry.url == "http://mlflow:5000"


def test_the_process_environment_is_read_when_none_is_given(monkeypatch):
    monkeypatch.setenv("OMNIDRAFT_LOG", "sqlite:///other.db")
    assert config.load().log.url == "sqlite:///other.db"


def test_variables_that_are_no_settings_are_left_alone():
    environ = {"OMNIDRAFT_REQUIRE_KAFKA": "1", "OMNIDRAFT_TEST_KAFKA": "127.0.0.1:9092", "__CF": "x"}
    assert config.load(environ=environ) == config.Settings()


def test_without_its_settings_an_environment_changes_nothing():
    others = {"OMNIDRAFT_HOME": "/models", "OMNIDRAFT_LOG_FORMAT": "json", "__CF": "x", "PATH": "/bin"}
    settings = {
        "OMNIDRAFT_LOG": "sqlite:///other.db",
        "MLFLOW_TRACKING_URI": "http://mlflow:5000",
        "OTEL_EXPORTER_OTLP_ENDPOINT": "http://collector:4318",
        "RAY_ADDRESS": "ray-head:6379",
        "OMNIDRAFT_WORKER__PORT": "8123",
        "omnidraft_learner__max_tokens": "80",
        "OMNIDRAFT_LERNER__LOSS": "dm",
    }
    assert config.without_settings(others | settings) == others


@pytest.mark.parametrize(
    ("environ", "name", "meant"),
    [
        ({"OMNIDRAFT_LEARNER__LOS": "dm"}, "learner.los", "; did you mean loss?"),
        ({"OMNIDRAFT_LERNER__LOSS": "dm"}, "lerner", "; did you mean learner?"),
        ({"OMNIDRAFT_LEARNER__QQQ": "dm"}, "learner.qqq", ""),
    ],
)
def test_a_misspelt_variable_is_refused_by_name(environ, name, meant):
    assert problem(environ=environ) == f"setting {name}: there is no such setting{meant}"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[learner]\nlos = 1\n", "setting learner.los: there is no such setting"),
        ("[lerner]\nloss = 1\n", "setting lerner: there is no such setting"),
        ("[decode]\nthreads = 0\n", "setting decode.threads: Input should be greater than or equal to 1, got 0"),
        ("[decode]\nthreads = 0\n[worker]\nport = 70000\n", "got 0; setting worker.port: "),
        ("decode = 3\n", "setting decode: "),
        ("[decode\n", "is not TOML"),
    ],
)
def test_a_mistake_in_the_file_is_one_line_that_names_it(toml, text, said):
    line = problem(toml(text), environ={})
    assert said in line
    assert "\n" not in line


def test_variables_that_are_not_json_are_named():
    environ = {
        "OMNIDRAFT_WORKER__API_KEYS": "notjson",
        "OMNIDRAFT_LEARNER__MAX_TOKENS": "100",
        "omnidraft_log__kafka": "{",
    }
    said = problem(environ=environ)
    assert said == (
        "setting OMNIDRAFT_WORKER__API_KEYS, omnidraft_log__kafka: not JSON: "
        'lists and tables are given as JSON, for example \'["a", "b"]\''
    )


def test_a_file_that_is_missing_or_a_folder_is_refused_by_name(tmp_path):
    missing = tmp_path / "none.toml"
    assert problem(missing, environ={}) == f"no settings file at {missing}"
    assert problem(tmp_path, environ={}) == f"{tmp_path} is a folder, not a settings file"


@pytest.mark.parametrize("url", ["redis://host:1", "kafka://", "kafka://host", "kafka://host:port", "sqlite:///", ""])
def test_an_address_that_is_not_a_log_is_refused(url):
    line = problem(environ={"OMNIDRAFT_LOG": url})
    assert line == (f"setting log.url: not a log: use sqlite:///path or kafka://host:port[,host:port], got {url!r}")


@pytest.mark.parametrize("url", ["mlflow:5000", "kafka://host:1", "http://", "directory://here", ""])
def test_an_address_that_is_not_a_registry_is_refused(url):
    assert problem(environ={"MLFLOW_TRACKING_URI": url}).startswith("setting registry.url: not a registry: use ")


def test_a_refused_address_does_not_show_its_password():
    assert "secret" not in problem(environ={"MLFLOW_TRACKING_URI": "ftp://me:secret@host"})


def test_settings_survive_pickling_and_json():
    """Ray builds its objects from pickled settings; a snapshot keeps them as JSON."""
    settings = config.load(environ={"OMNIDRAFT_LEARNER__MAX_TOKENS": "80"})
    assert type(settings) is config.Settings
    assert pickle.loads(pickle.dumps(settings)) == settings
    assert config.Settings.model_validate_json(settings.model_dump_json()) == settings


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"log": {"key_store": "postgresql://u@db/x"}}, "log.key_store is of no use without log.encryption_keys"),
        ({"log": {"kafka": {"username": "me", "password": "p"}}}, "log.kafka.username is not used with"),
        ({"log": {"kafka": {"ca_file": "/ca.pem"}}}, "certificates are not used with"),
        ({"log": {"kafka": {"token_url": "https://host/token"}}}, "log.kafka.token_url is for"),
        ({"registry": {"url": "http://mlflow:PORT"}}, "registry.url"),
        ({"registry": {"url": "http://mlflow:99999"}}, "registry.url"),
        ({"worker": {"tenant": ""}}, "worker.tenant"),
        ({"model": "qwen2.5-coder-0.5b"}, "is no section of settings"),
        ({"gpu_memory_utilization": 0.9}, "is no section of settings"),
    ],
)
def test_what_would_be_ignored_is_refused(settings, told):
    with pytest.raises(ConfigError, match=re.escape(told)):
        config.load(environ={}, **settings)

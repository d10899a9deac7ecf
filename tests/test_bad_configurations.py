"""Whatever a user configures wrongly is refused by name, before anything is started."""

import json
import sys

import pytest
import tensorflow as tf

import tf_dsgd
from tests import helpers
from tests.configurations import arguments, codecs, simulated, starting, tf_config
from tests.configurations.rule import check_refused
from tf_dsgd.launch import server as serve

TABLE = [*tf_config.RULES, *starting.RULES, *simulated.RULES, *arguments.RULES, *codecs.RULES]
RULES = {rule.sentence: rule for rule in TABLE}


def test_no_sentence_is_there_twice():
    assert len(RULES) == len(TABLE) >= 35


@pytest.mark.parametrize("sentence", RULES)
def test_wrong(sentence):
    rule = RULES[sentence]
    assert check_refused(rule) >= (3 if rule.few else 10)


@pytest.mark.parametrize("sentence", RULES)
def test_right(sentence):
    rule = RULES[sentence]
    values = rule.right() if callable(rule.right) else rule.right
    assert values
    for value in values:
        rule.apply(value)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (('"chief": [', '"boss": ['), 'TF_CONFIG["cluster"] has an unknown job "boss"'),
        (('"h3:2222"', '"h3:22222222"'), 'TF_CONFIG["cluster"]["ps"][0] is "h3:22222222"'),
        (('"cluster"', '"clusters"'), 'TF_CONFIG has no "cluster"'),
    ],
)
def test_whoever_reads_tf_config_refuses_it(change, words, monkeypatch, capsys):
    monkeypatch.setenv("TF_CONFIG", tf_config.GOOD_TEXT.replace(*change))
    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver
    readers = [
        tf_dsgd.DownpourStrategy,
        tf_dsgd.TFCluster,
        lambda: tf_dsgd.PeriodicAveragingStrategy(resolver()),
        tf_dsgd.callbacks.PeriodicAveraging,
    ]
    for reader in readers:
        with pytest.raises(ValueError) as caught:
            reader()
        assert str(caught.value).startswith(words)
    monkeypatch.setattr(sys, "argv", ["serve"])
    with pytest.raises(SystemExit) as ended:
        serve.main()
    assert ended.value.code == 1
    assert capsys.readouterr().err.startswith(f"tf_dsgd.serve: {words}")


@pytest.mark.parametrize("text", ["", " \n"])
def test_a_blank_tf_config_is_as_good_as_none(text, monkeypatch):
    monkeypatch.setenv("TF_CONFIG", text)
    assert isinstance(tf_dsgd.DownpourStrategy().cluster, tf_dsgd.LocalCluster)
    assert tf_dsgd.callbacks.PeriodicAveraging().num_workers == 1


# In a fresh process: what is there after all that needs no device was refused.
NOTHING_STARTED = """
import json, threading, psutil
from tests import test_bad_configurations
from tests.configurations.rule import check_refused
from tf_dsgd import _tf
from tf_dsgd.spmd import collectives

rules = [rule for rule in test_bad_configurations.TABLE if not rule.opens_devices]
for rule in rules:
    check_refused(rule)
process = psutil.Process()
print("LEFT", json.dumps({
    "rules": len(rules),
    "devices": _tf.devices_initialised(),
    "group": collectives._group is not None,
    "threads": [thread.name for thread in threading.enumerate()],
    "processes": len(process.children()),
    "connections": len(process.net_connections(kind="inet")),
}))
"""


def test_nothing_is_started():
    process = helpers.python(NOTHING_STARTED)
    assert process.returncode == 0, process.stderr
    (line,) = [row for row in process.stdout.splitlines() if row.startswith("LEFT")]
    assert json.loads(line.removeprefix("LEFT")) == {
        "rules": sum(not rule.opens_devices for rule in TABLE),
        "devices": False,
        "group": False,
        "threads": ["MainThread"],
        "processes": 0,
        "connections": 0,
    }

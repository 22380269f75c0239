"""Command lines drawn at random: right, wrong, and nearly right."""

import random
from collections.abc import Callable

import yaml

from nmt.cli.help import known_keys
from nmt.config.compose import config_dir, flatten

COMMANDS = ("train", "evaluate", "translate", "compare", "export")
NUMBERS = "0 1 -1 3 7.5 -0.0 1e5 1e-05 1e308 -1e308 5e-324 1e-400 1e400 nan inf -inf NaN 9223372036854775808 4294967296"
NUMBERS += f" 1180591620717411303424 {10**400} {'9' * 5000} 1_000 010 0x10 0o17 0b1 1e 1. .5 +3 --3 1:30 12,5"
WORDS = "yes no on off true False NULL null ~ None auto cpu best y gru dot x abc 2026-01-31 2026-13-45 a.b ../x /x . -"
ODD_WORDS = r"""
'' "" "a ' a'b 'a=b' a\=b a=b == a:b a@b [] [1] [1,2] [[1,[2]],3] [0.9,0.98] [0.9,nan] [a ] [a,b] [null] {} {a:1} {a
{kind:none} {kind:{a:1}} {a:{b:{c:[1,{d:2}]}}} {kind:[1]} {1:2} {hidden:3,hiden:4} (1) f(x) ${x} ${ ${} ${seed}
${oc.env:HOME} ${oc.env:NMT_NOT_THERE} ${now:%s} ${.x} ${..x} ${encoder} ${nope:1} ${oc.decode:'['} ${run_dir:1}
${hydra:runtime.cwd} \${x} $x ??? %s 1,2 choice(1,2) range(1,3) range(3) range(1,10000000000) range(0,1,0) glob(*)
interval(0,1) sort(2,1) shuffle(1,2) tag(a,1,2) int(3) str(3) bool(yes) float(x) extend_list(1) a,b,
[[[[[[[[[[[[[[[[[[[[]]]]]]]]]]]]]]]]]]]] ((((((((((((((((((((((((( !!python/object:os.system *a &a | > @x `x` \ \\
'\' a#b
"""
# fmt: off
ODD = [
    "", "' '", "'a b'", "a b", " 3", "3 ", "a: b", "- a", "# a", "a\nb", "a\tb", "\x1b[31m", "\x07", "a\rb",
    "\udcff", "\u202e"
]
# fmt: on
ODD += [
    "\u2028",
    "'\n'",
    "'\x00'",
    "🙂",
    "'日本'",
    "x" * 5_000,
    "x" * 1_000_000,
    "[" * 1_000 + "]" * 1_000,
    "[" * 20 + "]" * 20,
]
ODD += ["1," * 3_000, "(" * 25, "${" * 200]
VALUES = [*NUMBERS.split(), *WORDS.split(), *ODD_WORDS.split(), *ODD]
HYDRA_WORDS = r"""
hydra.run.dir=new hydra.run.dir= hydra.run.dir=../beside hydra.run.dir=a/b/c hydra.run.dir=/proc/x hydra.run.dir=.
hydra.run.dir=${hydra.run.dir} hydra.sweep.dir=s hydra.sweep.subdir=x hydra.launcher.n_jobs=2
hydra/launcher=parallel hydra/launcher=nope hydra/sweeper=optuna hydra.job.name= hydra.job.name=x hydra.job.num=3
hydra.job.id=1 hydra.mode=RUN hydra.job.chdir=maybe hydra.job.env_set={A:1} hydra.callbacks=null
hydra.callbacks.sweep._target_=os.system hydra=x hydra.callbacks.sweep._target_=nope hydra.runtime.cwd=/
hydra.overrides.task=[] hydra.nope=1 hydra.verbose=maybe hydra. hydra.output_subdir=x
hydra.searchpath=[file:///nope] hydra.searchpath=3 hydra/help=nope hydra.help.template=x
hydra.sweeper.params={seed:3} +hydra.x=1 ~hydra.run ~hydra.run.dir hydra/job_logging=nope hydra.version_base=9
"""
FLAGS_WORDS = r"""
--cfg --cfg=job --cfg=jop --info=config --info=x --config-dir=nope --config-name=nope -p --config-name=
--config-path=nope --config-dir= --nope -x --resolve -m=3 --help=3 -- --package=nope --experimental-rerun=x - --run
-c --cfg=all --multirun=x -i --info=all
"""
BROKEN_WORDS = "seed =3 = == ~ + ++ += ~~seed @ @=1 a@ .=1 a..b=1 .a=1 a.=1"
HYDRA, FLAGS, BROKEN = HYDRA_WORDS.split(), FLAGS_WORDS.split(), ["", " ", *BROKEN_WORDS.split()]


def _sensible_values() -> dict[str, list[str]]:
    """What the YAML files have for each name: mostly right, if not for every choice."""
    found: dict[str, list[str]] = {}
    for path in sorted(config_dir().rglob("*.yaml")):
        for key, value in flatten(yaml.safe_load(path.read_text(encoding="utf-8")) or {}):
            text = "null" if value is None else str(value).replace(" ", "")
            found.setdefault(key.rpartition(".")[2], []).append(text)
    return found


SENSIBLE = _sensible_values()


def drawn(rng: random.Random, run: str) -> tuple[str, list[str]]:
    """A command and its words; `run` is a run directory."""
    command = rng.choices(COMMANDS, (5, 2, 2, 2, 1))[0]
    words = [_word(rng, command) for _ in range(rng.choice((1, 1, 1, 2, 3, 4)))]
    if rng.random() < 0.03:
        words.insert(0, "-m")
    one = [f"run={run}"]
    needed = {
        "train": [],
        "evaluate": one,
        "translate": one,
        "compare": [f"runs={run}"],
        "export": [*one, "output=m.nmt"],
    }
    return command, [*(needed[command] if rng.random() < 0.95 else []), *words]


def _word(rng: random.Random, command: str) -> str:
    kind = rng.random()
    if kind < 0.03:
        return rng.choice(BROKEN)
    if kind < 0.07:
        return rng.choice(FLAGS)
    if kind < 0.13:
        return rng.choice(HYDRA)
    key = rng.choice(known_keys(command))
    folder = config_dir() / key.replace(".", "/")
    if folder.is_dir() and rng.random() < 0.7:
        return f"{key}={rng.choice(sorted(path.stem for path in folder.glob('*.yaml')))}"
    name = key.rpartition(".")[2]
    if rng.random() < 0.5 and name in SENSIBLE:
        small = rng.choice(("1", "2", "7", "0.1"))
        return f"{rng.choice(('', '', '', '++'))}{key}={rng.choice([*SENSIBLE[name], small])}"
    return f"{_changed(rng, key)}{rng.choice(('=', '=', '=', '=', '=', '=', '=', '= ', ' =', ''))}{rng.choice(VALUES)}"


def _changed(rng: random.Random, key: str) -> str:
    """Mostly the key itself, else one that is nearly it."""
    changes: list[Callable[[], str]] = [
        lambda: f"+{key}",
        lambda: f"++{key}",
        lambda: f"~{key}",
        lambda: f"{key}@{rng.choice(('x', '_global_', '_here_', 'a.b', ''))}",
        lambda: f"{key}.x",
        lambda: f"{key}[0]",
        lambda: key.replace(".", "/"),
        key.upper,
        key.capitalize,
        lambda: key[:-1],
        lambda: f"{key} ",
        lambda: key + rng.choice("xé.-:'\n"),
        lambda: key.rpartition(".")[2],
    ]
    return key if rng.random() < 0.75 else rng.choice(changes)()

"""When a difference between base and head matters: read from TOML, applied to measurements, never part of them."""

import tomllib
from dataclasses import dataclass, fields
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal

SHIPPED = Path(__file__).with_name("baseline_policies.toml")
Direction = Literal["higher", "lower", "neither"]


@dataclass(frozen=True)
class BaselinePolicy:
    """One policy; `baseline_policies.toml` explains its keys. Patterns are shell wildcards, the first match counts."""

    name: str
    alpha: float
    latency_level: float
    latency_tolerated: float
    latency_noise: float
    unpaired: Literal["report", "fail"]
    isolated: Literal["report", "fail"]
    higher_is_better: tuple[str, ...]
    lower_is_better: tuple[str, ...]
    ignored: tuple[str, ...]
    tolerated: dict[str, float | str]
    any_seed: dict[str, float | str]

    def direction(self, metric: str, comparison: str = "accumulated") -> Direction:
        """Which way is better; neither for metrics that may move without failing."""
        if comparison == "isolated" and self.isolated == "report":
            return "neither"
        if _matches(metric, self.higher_is_better):
            return "higher"
        return "lower" if _matches(metric, self.lower_is_better) else "neither"

    def ignores(self, metric: str) -> bool:
        return _matches(metric, self.ignored)

    def tolerates(self, metric: str, base: float) -> float:
        """Largest shift of the mean that does not fail, in the metric's unit; `base` is the base's mean."""
        return _size(self.tolerated, metric, base, 0.0)

    def seed_limit(self, metric: str, base: float) -> float:
        """Largest harm at one seed that does not fail by itself."""
        return _size(self.any_seed, metric, base, float("inf"))


def _matches(metric: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatchcase(metric, pattern) for pattern in patterns)


def _size(sizes: dict[str, float | str], metric: str, base: float, otherwise: float) -> float:
    for pattern, size in sizes.items():
        if fnmatchcase(metric, pattern):
            return abs(base) * _percent(size) / 100 if isinstance(size, str) else float(size)
    return otherwise


def _percent(text: str) -> float:
    number = text.strip().removesuffix("%")
    if number == text.strip():
        raise ValueError(f'{text!r} is no size; write a number, or a share of the base as "1 %"')
    return float(number)


def load_baseline_policy(spec: str) -> BaselinePolicy:
    """A shipped policy by name, or one from a TOML file. ValueError with what is wrong and what is known."""
    shipped = tomllib.loads(SHIPPED.read_text())
    if spec in shipped:
        return _make(spec, _resolve(shipped[spec], shipped), spec)
    file = Path(spec)
    if not file.is_file():
        raise ValueError(f"policy {spec!r} is none of {', '.join(shipped)}, nor a file; name one or give a TOML file")
    try:
        raw = tomllib.loads(file.read_text())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{file} is not TOML: {error}") from error
    return _make(file.stem, _resolve(raw, shipped), str(file))


def _resolve(table: dict[str, Any], shipped: dict[str, Any]) -> dict[str, Any]:
    """`table` over the one it extends; tables of sizes are merged, its own patterns first."""
    table = dict(table)
    parent = table.pop("extends", None)
    if parent is None:
        return table
    if parent not in shipped:
        raise ValueError(f"extends = {parent!r} is none of {', '.join(shipped)}")
    below = _resolve(shipped[parent], shipped)
    for name in ("tolerated", "any_seed"):
        own = table.get(name, {})
        table[name] = {**own, **{key: size for key, size in below.get(name, {}).items() if key not in own}}
    return {**below, **table}


def _make(name: str, table: dict[str, Any], where: str) -> BaselinePolicy:
    known = {item.name for item in fields(BaselinePolicy)} - {"name"}
    if unknown := set(table) - known:
        raise ValueError(f"{where}: unknown key {', '.join(sorted(unknown))}; keys are {', '.join(sorted(known))}")
    if missing := known - set(table):
        raise ValueError(f'{where}: {", ".join(sorted(missing))} not set; set it, or write extends = "default"')
    values: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in table.items()}
    policy = BaselinePolicy(name, **values)
    if not (isinstance(policy.alpha, float) and 0 < policy.alpha < 1):
        raise ValueError(f"{where}: alpha = {policy.alpha!r} is no error probability; give one between 0 and 1")
    if not (isinstance(policy.latency_level, float) and 0 < policy.latency_level < 1):
        raise ValueError(
            f"{where}: latency_level = {policy.latency_level!r} is no confidence; give one between 0 and 1"
        )
    for key in ("unpaired", "isolated"):
        if table[key] not in ("report", "fail"):
            raise ValueError(f'{where}: {key} = {table[key]!r}; write "report" or "fail"')
    for size in (*policy.tolerated.values(), *policy.any_seed.values()):
        if isinstance(size, str):
            _percent(size)
    return policy

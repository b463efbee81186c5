"""Numbers as people read them."""


def apart(*values: float) -> tuple[str, ...]:
    """Values with as few digits (4 at least) as make different ones print differently."""
    for digits in range(4, 17):
        texts = tuple(f"{value:.{digits}g}" for value in values)
        if len(set(texts)) == len({*values}):
            return texts
    return tuple(repr(value) for value in values)


def place(where: dict[str, int]) -> str:
    """Coordinates as "row 3, entry 70"."""
    return ", ".join(f"{name} {number}" for name, number in where.items())


def ranges(numbers: list[int]) -> str:
    """Sorted numbers with runs of three or more joined: "0-3, 7, 9"."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][-1] == number - 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    parts = [f"{run[0]}-{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs]
    return ", ".join(parts)

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

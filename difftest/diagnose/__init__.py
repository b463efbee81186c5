"""From a red result to a named cause: substitution, shrinking, seeded faults and bisection."""

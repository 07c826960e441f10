"""An import-linter contract that names what a package may import, instead of what it may not."""

from __future__ import annotations

import sys
from typing import Any

from grimp import ImportGraph
from importlinter import Contract, ContractCheck, fields, output

# What would make a pure package talk to the world, although the standard library holds it.
WORLD = frozenset({"asyncio", "selectors", "socket", "socketserver", "subprocess", "threading"})


class AllowedContract(Contract):
    """``source`` imports itself, the standard library without ``WORLD``, and ``allowed``."""

    type_name = "allowed"

    source = fields.StringField()
    allowed = fields.SetField(subfield=fields.StringField())

    def check(self, graph: ImportGraph, verbose: bool) -> ContractCheck:
        source, allowed = str(self.source), set(self.allowed)  # type: ignore[call-overload]
        broken = []
        for module in sorted({source} | graph.find_descendants(source)):
            for imported in sorted(graph.find_modules_directly_imported_by(module)):
                top = imported.split(".")[0]
                ours = imported == source or imported.startswith(source + ".")
                library = top in sys.stdlib_module_names and top not in WORLD
                if not (ours or library or imported in allowed):
                    broken.append((module, imported))
        return ContractCheck(kept=not broken, metadata={"broken": broken})

    def render_broken_contract(self, check: ContractCheck) -> None:
        pairs: Any = check.metadata["broken"]
        for module, imported in pairs:
            output.print_error(f"{module} may not import {imported}", bold=False)
        output.new_line()

"""Where a program's flat lists of inputs, outputs and saved values hold what: read off its tables once."""

from __future__ import annotations

from .lazy import Assembly
from .program import InputKind, Output, OutputKind, Program, output_values, placeholders


def updated_buffers(program: Program) -> list[int]:
    """For each buffer update the position of that buffer among the inputs."""
    positions = {each.name: index for index, each in enumerate(program.inputs) if each.kind is InputKind.BUFFER}
    return [positions[output.name] for output in program.outputs_of(OutputKind.BUFFER)]


def saved_parameters(program: Program) -> dict[int, int]:
    """The saved values that are parameters: position among the saved values -> position among the inputs."""
    assert program.forward is not None
    inputs = {node: index for index, node in enumerate(placeholders(program.forward.graph))}
    first = len(program.outputs_of(OutputKind.USER)) + len(program.outputs_of(OutputKind.BUFFER))
    saved = output_values(program.forward.graph)[first:]
    return {
        position: inputs[node]
        for position, node in enumerate(saved)
        if node in inputs and program.inputs[inputs[node]].kind is InputKind.PARAMETER
    }


def assemblies_of(program: Program) -> dict[int, Assembly]:
    """How the user outputs that stay split become whole, by their position."""
    return {
        index: _assembly(program, output)
        for index, output in enumerate(program.outputs_of(OutputKind.USER))
        if output.layout is not None and output.layout.is_split
    }


def _assembly(program: Program, output: Output) -> Assembly:
    assert program.sharding is not None and output.layout is not None
    assert not output.differentiable, "an output that takes a gradient is returned whole"
    return Assembly(output.layout, program.sharding, program.mesh, program.rank)

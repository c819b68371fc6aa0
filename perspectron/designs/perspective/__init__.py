"""Perspective: a recurrence with a decay for each row, windowed attention, experts on a torus, viewpoints, adaptation
while reading and a safety set (docs/designs/perspective.md)."""

from perspectron.util.registry import Design, register

register(
    Design(
        __name__,
        mixers={"pdr": "pdr:PDR", "pdr2": "pdr2:PDR2"},
        presets="presets",
        ablations={
            "perspective": "ablations:PERSPECTIVE",
            "perspective-experts": "ablations:PERSPECTIVE",
            "perspective2": "ablations:PERSPECTIVE2",
        },
        suites={"perspectives": "suites.views", "depth": "suites.depth"},
        commands={
            "routes": "commands.routes:ShowRoutes",
            "trace": "commands.trace:TraceRoutes",
            "gate": "commands.gate:Gate",
            "views": "commands.views:PerspectivesOf",
            "safety": "commands.safety:SafetyOf",
            "adapt": "commands.adapt:Adapt",
        },
        hooks={"perspectives": "views:Perspectives", "safety": "safety:Safety", "adapter": "adapt:Adapting"},
        recipes={"staged": "recipe"},
        cases={"eligibility": "cases:cases"},
        titles={
            "perspective": "Perspective",
            "perspective2": "Perspective 2",
            "perspective-experts": "Perspective with experts",
            "pdr2": "PDR 2",
        },
    )
)

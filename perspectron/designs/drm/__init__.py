"""The DRM emitter: a state that moves under a learned metric (docs/designs/drm.md)."""

from perspectron.util.registry import Design, register

register(
    Design(
        __name__,
        mixers={"drm": "mixer:DRM"},
        heads={"emitter": "head:Emitter"},
        presets="presets",
        ablations={"drm": "ablations:DRM"},
        commands={"geometry": "geometry_command:GeometryOf"},
        cases={"drm": "cases:cases"},
        titles={"drm": "DRM", "drm2": "DRM 2"},
    )
)

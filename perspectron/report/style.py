"""The look of the report: its colours in light and dark, its type, its tables and its charts.

The colours of lines keep a contrast of 4.5 to the ground in both schemes, and stay apart (ΔE ≥ 10 in CIELAB) as readers
without one kind of cone see them; dashes and marks tell them apart without colour.
"""

LIGHT = {
    "ground": "#ffffff",
    "ink": "#1b1d21",
    "soft": "#5a5f68",
    "rule": "#c9ccd2",
    "grid": "#e8eaed",
    "bad": "#a8321a",
    "wash": "#f6f7f8",
}
DARK = {
    "ground": "#15171b",
    "ink": "#e6e8eb",
    "soft": "#a3a9b3",
    "rule": "#454b55",
    "grid": "#282c33",
    "bad": "#ff9b82",
    "wash": "#1d2025",
}
LINES = (  # light, dark, dash of each style
    ("#1b1d21", "#f0f1f3", ""),
    ("#053f8b", "#96b2f8", ""),
    ("#591100", "#f59a56", "7 3"),
    ("#005c32", "#2cb488", "2.5 2.5"),
    ("#580e4c", "#d14dbc", "9 3 2.5 3"),
    ("#887402", "#d3bf1e", "5 2"),
    ("#5d61d0", "#837eff", "12 3"),
    ("#117796", "#a4d8ee", "1.5 3"),
    ("#ca4753", "#ff455a", "6 2 1.5 2 1.5 2"),
    ("#49555f", "#758899", "3 4"),
)


def _variables(scheme: int) -> str:
    base = (LIGHT, DARK)[scheme]
    pairs = [*base.items(), *((f"s{i}", line[scheme]) for i, line in enumerate(LINES))]
    return ";".join(f"--{name}:{value}" for name, value in pairs)


_DASHES = "".join(
    f".s{i}{{color:var(--s{i})}}" + (f"g.s{i} .mean{{stroke-dasharray:{dash}}}" if dash else "")
    for i, (_, _, dash) in enumerate(LINES)
)

STYLE = f"""
:root{{color-scheme:light dark;{_variables(0)}}}
@media screen and (prefers-color-scheme:dark){{:root{{{_variables(1)}}}}}
*{{box-sizing:border-box}}
html{{-webkit-text-size-adjust:100%}}
body{{margin:0;background:var(--ground);color:var(--ink);
font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif}}
main{{max-width:1200px;margin:0 auto;padding:40px 24px 72px}}
h1{{font-size:26px;line-height:1.25;font-weight:650;margin:0 0 6px;letter-spacing:-.01em}}
h2{{font-size:18px;line-height:1.3;font-weight:650;margin:0 0 10px}}
h3{{font-size:14px;font-weight:600;margin:0}}
p,ul.points{{max-width:76ch;margin:0 0 10px}}
.lede{{color:var(--soft);font-size:16px}}
nav{{display:flex;flex-wrap:wrap;gap:2px 16px;margin-top:12px;font-size:13px}}
a{{color:var(--s1);text-decoration:none}} a:hover{{text-decoration:underline}}
section{{margin-top:36px;padding-top:16px;border-top:1px solid var(--rule)}}
.points{{padding-left:18px}} .points li{{margin:3px 0}} .points li::marker{{color:var(--soft)}}
.quiet,figcaption p{{color:var(--soft);font-size:13px}}
.facts{{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,240px),1fr));gap:8px 24px;margin:0 0 14px;
font-size:13.5px}}
.facts dt{{color:var(--soft);font-size:12px}} .facts dd{{margin:0;overflow-wrap:anywhere;
font-variant-numeric:tabular-nums}}
pre{{margin:0 0 12px;padding:10px 12px;background:var(--wash);border:1px solid var(--grid);border-radius:4px;
white-space:pre-wrap;overflow-wrap:anywhere;font:12.5px/1.5 ui-monospace,SFMono-Regular,Menlo,Consolas,monospace}}
.scroll{{overflow-x:auto;margin:0 0 12px;max-width:100%}}
table{{border-collapse:collapse;font-size:13.5px;line-height:1.35;font-variant-numeric:tabular-nums}}
caption{{text-align:left;color:var(--soft);font-size:13px;padding:0 0 6px}}
caption span{{display:inline-block;position:sticky;left:0;max-width:min(76ch,calc(100vw - 34px))}}
th,td{{padding:5px 0 5px 18px;text-align:right;vertical-align:top;white-space:nowrap;font-weight:400}}
th:first-child{{padding-left:0}}
thead th{{color:var(--soft);font-size:12.5px;vertical-align:bottom;border-bottom:1px solid var(--rule);
white-space:normal;min-width:4.5em}}
tbody tr+tr>*{{border-top:1px solid var(--grid)}}
tbody th{{position:sticky;left:0;background:var(--ground);padding-right:4px}}
.words{{text-align:left}} td.words{{white-space:normal;min-width:12em;max-width:38em}}
small{{display:block;font-size:12px;color:var(--soft);white-space:pre}} .words small{{white-space:normal}}
.best,.chosen{{font-weight:650}} .best small,.chosen small{{font-weight:400}} .bad{{color:var(--bad)}}
td.quiet,th.quiet{{color:var(--soft);font-size:inherit}}
.key{{list-style:none;display:flex;flex-wrap:wrap;gap:4px 18px;margin:0 0 12px;padding:0;font-size:13px}}
.key li{{display:flex;align-items:center}}
.swatch{{width:34px;height:12px;margin-right:7px;vertical-align:-1px;flex:none}}
.gallery{{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,460px),1fr));
gap:26px 32px;margin-bottom:14px}}
.gallery.small{{grid-template-columns:repeat(auto-fill,minmax(min(46%,220px),1fr));gap:18px 20px}}
figure{{margin:0;min-width:0}} figcaption{{margin-bottom:4px}} figcaption p{{margin:0}}
figure>svg{{display:block;width:100%;height:auto;max-width:640px}}
details{{font-size:13px;margin-top:4px}} summary{{color:var(--soft);cursor:pointer;width:max-content}}
svg text{{font-size:12.5px;fill:var(--ink);font-variant-numeric:tabular-nums}}
svg .tick,svg .axis{{fill:var(--soft)}} svg .axis{{font-size:12.5px}} svg .note{{fill:var(--soft);font-size:11.5px}}
.gallery.small svg text{{font-size:11px}}
svg .name{{fill:currentColor;font-weight:500}}
svg path{{fill:none;stroke:currentColor;stroke-linejoin:round}}
svg .grid{{stroke:var(--grid)}} svg .rule{{stroke:var(--rule)}}
svg .level{{stroke:var(--soft);stroke-dasharray:2 3}} svg .lead{{stroke-width:.8;opacity:.55}}
svg .thread{{stroke-width:1;opacity:.38}} svg .mean{{stroke-width:2}} svg .cross{{stroke-width:2}}
svg .mark{{fill:currentColor;stroke:var(--ground);stroke-width:.8}}
svg .bubble{{fill:currentColor;stroke:none;opacity:.75}}
{_DASHES}
@media (max-width:520px){{main{{padding:24px 16px 48px}} body{{font-size:16px}} h1{{font-size:23px}}
.gallery:not(.small) svg text{{font-size:14px}}
.gallery svg text.name{{font-size:13px!important}} .gallery.small svg text{{font-size:12.5px}}
.facts{{grid-template-columns:1fr 1fr;gap:8px 16px}}}}
@media print{{main{{max-width:none;padding:0}} body{{font-size:10.5pt}} nav,summary{{display:none}}
section{{margin-top:18pt}} figure,tr,pre,.facts div{{break-inside:avoid}} h2,h3,caption{{break-after:avoid}}
.scroll{{overflow:visible}} table{{font-size:8pt}} th,td{{padding-left:8pt;white-space:normal}}
.gallery{{grid-template-columns:1fr 1fr}} .gallery.small{{grid-template-columns:repeat(4,1fr)}}}}
"""

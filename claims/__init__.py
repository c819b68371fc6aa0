"""Every quantitative claim of the five documents, beside a measurement and a verdict that is computed."""

"""Language models that look before they remember."""

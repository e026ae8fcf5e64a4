"""Tables of the codec's choices by hand."""

import pytest
from choices_tables import alternatives_table, change, exact_layers_table, layers_table, worst_layers


def entry(**layers):
    """An alternative at 2 bits whose figures are the output errors given, by layer."""
    names = ("value_error", "output_error_of_keys", "output_error_of_values", "logit_error", "history_mass")
    figures = {layer[1:]: dict.fromkeys(names, 0.5) | {"output_error": error} for layer, error in layers.items()}
    return {"bits_per_element": 2.0, "layers": figures}


RESULTS = {
    "values": {"default": entry(l0=0.1, l9=0.4), "other": entry(l0=0.2, l9=0.1)},
    "bands": {"64 + 256": entry(l0=0.3, l3=0.1, l9=0.4)},
    "pairs": {"both": entry(l0=0.05, l9=0.2)},
}


def test_change_is_a_geometric_mean_over_layers():
    # ratios 2 and 1/4
    assert change(RESULTS, "values", "other", "output_error") == pytest.approx(0.5**0.5 - 1)
    assert change(RESULTS, "pairs", "both", "output_error") == pytest.approx(-0.5)


def test_alternatives_show_means_and_changes():
    header, rows = alternatives_table({"A": RESULTS}, "values")
    assert header == ["values", "bits", "A: V", "A: output, values alone", "A: output", "change"]
    assert rows == [
        ["default", "2.000", "0.5000", "0.5000", "0.2500", "+0.0 %"],
        ["other", "2.000", "0.5000", "0.5000", "0.1500", "−29.3 %"],
    ]


def test_an_alternative_that_one_model_lacks_has_dashes():
    lacking = RESULTS | {"values": {"default": RESULTS["values"]["default"]}}
    _, rows = alternatives_table({"A": lacking, "B": RESULTS}, "values")
    assert rows[1] == ["other", "2.000", "-", "-", "-", "-", "0.5000", "0.5000", "0.1500", "−29.3 %"]


def test_layers_of_the_default():
    _, rows = layers_table(RESULTS)
    assert [row[0] for row in rows] == ["0", "3", "9"]
    assert rows[2][-1] == "0.4000"


def test_exact_layers_leave_the_rest():
    assert worst_layers(RESULTS["bands"]["64 + 256"]["layers"], 2) == ["9", "0"]
    _, rows = exact_layers_table({"A": RESULTS})
    # √(0.09 + 0.01 + 0.16), then without layer 9; one layer of three costs 14/3 bits
    assert rows[0] == ["0", "-", "2.00", "0.510"]
    assert rows[1] == ["1", "9", "6.67", "0.316"]
    assert rows[2] == ["2", "0, 9", "11.33", "0.100"]

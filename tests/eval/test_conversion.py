"""What a conversion lost: recall, and costs."""

from dataclasses import replace

from perspectron.eval.conversion import Options, costs, recall


def test_recall_at_once_needs_no_text(subject):
    """Where the held-out text is too short to read before the questions, only those after it are left out."""
    asked = Options(pairs=(4,), texts=2, later=100)
    it = subject("transformer")
    assert list(recall(it, asked)) == ["4", "4 later"]
    assert recall(it, replace(asked, later=it.text.tokens + 1)) == {"4": recall(it, asked)["4"]}


def test_contexts_past_a_table_of_positions_are_left_out(subject):
    it = subject("gpt2")
    table = it.model.config.positions
    found = costs({"teacher": it, "converted": it}, Options(contexts=(16, table + 1), rounds=1))
    assert list(found["teacher"]) == list(found["converted"]) == ["16"]
    assert costs({"teacher": it}, Options(contexts=(table + 1,), rounds=1)) == {"teacher": {}}

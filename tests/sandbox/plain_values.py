"""Any value that may cross the border of a cell, as a strategy of Hypothesis."""

from hypothesis import strategies as st

plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text() | st.integers() | st.booleans(), inner, max_size=4)
        | st.sets(st.integers() | st.text() | st.tuples(st.integers(), st.text()), max_size=4)
    ),
    max_leaves=12,
)

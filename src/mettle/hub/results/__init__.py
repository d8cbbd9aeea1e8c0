"""Results of evaluations that people push, in the field's format: kept, shown, ranked."""

"""Operations as a run opens them, their pinned inputs, and views of interrupted ones."""

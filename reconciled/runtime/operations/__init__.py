"""Operations as a run opens them, and what they keep of their manifest."""

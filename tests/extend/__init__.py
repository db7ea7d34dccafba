"""Extensions that an outside program makes: each file imports public names alone."""

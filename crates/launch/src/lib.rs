//! Processes as ranks: who am I, starting the others, meeting them, and noticing when one is gone.

//! The simulated provider.

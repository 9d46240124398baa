//! The shared-memory provider.

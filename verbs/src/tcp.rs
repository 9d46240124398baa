//! The TCP provider.

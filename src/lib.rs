//! towline

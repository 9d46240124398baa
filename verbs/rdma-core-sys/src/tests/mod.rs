//! The tests that need no device.

pub(crate) mod c;
mod conventions;
mod discovery;
pub(crate) mod fakes;
pub(crate) mod layout;
mod traps;

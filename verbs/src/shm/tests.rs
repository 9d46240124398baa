//! Tests of the provider through the public handles, and of its protocol against a peer that breaks it.
#![allow(unsafe_code)]

mod connection;
mod hostile;
mod processes;
mod reads;
mod support;
mod teardown;
mod writes;

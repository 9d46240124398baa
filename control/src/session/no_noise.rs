//! What stands in for Noise in a build without it: a channel that can't be made.

use super::{Secret, SessionError};

pub(super) const AVAILABLE: bool = false;
pub(super) const TAG_LEN: usize = 16;
pub(super) const MAX_MESSAGE: usize = 65_535;

#[derive(Debug)]
pub(super) enum Noise {}

impl Noise {
    pub(super) fn initiator(_: &Secret, _: &[u8]) -> Result<(Self, Vec<u8>), SessionError> {
        Err(SessionError::NoNoise)
    }

    pub(super) fn responder(_: &Secret, _: &[u8]) -> Result<Self, SessionError> {
        Err(SessionError::NoNoise)
    }

    pub(super) fn handshake(self, _: &[u8]) -> Result<(Self, Option<Vec<u8>>), SessionError> {
        match self {}
    }

    pub(super) fn encrypt(&mut self, _: &[u8], _: &mut Vec<u8>) -> Result<(), SessionError> {
        match *self {}
    }

    pub(super) fn decrypt(&mut self, _: &[u8], _: &mut [u8]) -> Result<usize, SessionError> {
        match *self {}
    }
}

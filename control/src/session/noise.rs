//! `Noise_NNpsk0_25519_ChaChaPoly_BLAKE2s`: both ends prove that they have the secret, and what follows is encrypted.
//!
//! A thin wrapper over `snow`: the handshake's two messages, then messages of at most 65,535 bytes (Noise
//! specification, section 3) of which 16 are the tag. Ephemeral keys come from the system's random numbers.

use super::{Secret, SessionError};
use core::fmt;
use snow::params::HashChoice;
use snow::resolvers::{CryptoResolver, DefaultResolver};

const PARAMS: &str = "Noise_NNpsk0_25519_ChaChaPoly_BLAKE2s";

/// Sets this use of a secret apart from every other.
const PSK_DOMAIN: &[u8] = b"towline control 1: pre-shared key of Noise_NNpsk0\0";
const PROLOGUE_DOMAIN: &[u8] = b"towline control 1: prologue\0";

/// Whether this build has it.
pub(super) const AVAILABLE: bool = true;

/// Bytes that encryption adds.
pub(super) const TAG_LEN: usize = 16;

/// Largest message.
pub(super) const MAX_MESSAGE: usize = 65_535;

/// One end of a channel under Noise.
pub(super) enum Noise {
    Handshake(Box<snow::HandshakeState>),
    Transport(Box<snow::TransportState>),
}

impl Noise {
    /// The end that speaks first, and its first message. `preface` is what it said in clear: an end that was told
    /// another preface fails the handshake.
    pub(super) fn initiator(secret: &Secret, preface: &[u8]) -> Result<(Self, Vec<u8>), SessionError> {
        let mut handshake = build(secret, preface, true)?;
        let message = write(&mut handshake)?;
        Ok((Self::Handshake(Box::new(handshake)), message))
    }

    /// The end that answers.
    pub(super) fn responder(secret: &Secret, preface: &[u8]) -> Result<Self, SessionError> {
        Ok(Self::Handshake(Box::new(build(secret, preface, false)?)))
    }

    /// Reads the peer's handshake message; gives the answer if there is one, and the channel that is now open.
    ///
    /// An error means that the peer has another secret, or that somebody changed the message.
    pub(super) fn handshake(self, message: &[u8]) -> Result<(Self, Option<Vec<u8>>), SessionError> {
        let Self::Handshake(mut handshake) = self else { return Err(SessionError::Decrypt) };
        let mut payload = [0; 64];
        let len = handshake.read_message(message, &mut payload).map_err(|_| SessionError::Decrypt)?;
        if len != 0 {
            return Err(SessionError::Decrypt);
        }
        let answer = if handshake.is_handshake_finished() { None } else { Some(write(&mut handshake)?) };
        let transport =
            handshake.into_transport_mode().map_err(|_| SessionError::Noise { what: "the end of the handshake" })?;
        Ok((Self::Transport(Box::new(transport)), answer))
    }

    /// Appends `clear` to `out` as messages, each behind its length in two bytes, most significant first.
    pub(super) fn encrypt(&mut self, clear: &[u8], out: &mut Vec<u8>) -> Result<(), SessionError> {
        const FAILED: SessionError = SessionError::Noise { what: "encryption" };
        let Self::Transport(transport) = self else { return Err(FAILED) };
        for chunk in clear.chunks(MAX_MESSAGE - TAG_LEN) {
            let len = chunk.len() + TAG_LEN;
            out.extend(u16::try_from(len).map_err(|_| FAILED)?.to_be_bytes());
            let start = out.len();
            out.resize(start + len, 0);
            transport.write_message(chunk, &mut out[start..]).map_err(|_| FAILED)?;
        }
        Ok(())
    }

    /// Decrypts one message into `clear`, which has room for it, and says how many bytes it gave.
    pub(super) fn decrypt(&mut self, message: &[u8], clear: &mut [u8]) -> Result<usize, SessionError> {
        match self {
            Self::Transport(transport) if message.len() >= TAG_LEN => {
                transport.read_message(message, clear).map_err(|_| SessionError::Decrypt)
            }
            _ => Err(SessionError::Decrypt),
        }
    }
}

impl fmt::Debug for Noise {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Handshake(_) => "Noise::Handshake",
            Self::Transport(_) => "Noise::Transport",
        })
    }
}

fn build(secret: &Secret, preface: &[u8], initiator: bool) -> Result<snow::HandshakeState, SessionError> {
    const FAILED: SessionError = SessionError::Noise { what: "set-up" };
    let psk = psk(secret).ok_or(FAILED)?;
    let prologue = [PROLOGUE_DOMAIN, preface].concat();
    let params = PARAMS.parse().map_err(|_| FAILED)?;
    let builder = snow::Builder::new(params).psk(0, &psk).and_then(|builder| builder.prologue(&prologue));
    let builder = builder.map_err(|_| FAILED)?;
    if initiator { builder.build_initiator() } else { builder.build_responder() }.map_err(|_| FAILED)
}

fn write(handshake: &mut snow::HandshakeState) -> Result<Vec<u8>, SessionError> {
    // Either message is an ephemeral key and a tag: 48 bytes.
    let mut message = vec![0; 128];
    let len = handshake
        .write_message(&[], &mut message)
        .map_err(|_| SessionError::Noise { what: "an ephemeral key (the system's random numbers)" })?;
    message.truncate(len);
    Ok(message)
}

/// BLAKE2s of the domain and the secret.
fn psk(secret: &Secret) -> Option<[u8; 32]> {
    let mut hash = DefaultResolver.resolve_hash(&HashChoice::Blake2s)?;
    let mut psk = [0; 32];
    hash.input(PSK_DOMAIN);
    hash.input(secret.as_bytes());
    hash.result(&mut psk);
    Some(psk)
}

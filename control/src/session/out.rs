//! The sending half of a session: how a frame becomes bytes on the wire, in clear or under Noise.

use super::buffer::{Inbox, Outbox};
use super::noise::Noise;
use super::{Identity, SendError, SessionConfig, SessionError};
use crate::wire::{EncodeError, Frame, Hello, RejectCode};

/// The sending half.
#[derive(Default)]
pub(super) struct Out {
    pub(super) channel: Channel,
    pub(super) outbox: Outbox,
    /// Frames in clear that wait until the peer is established.
    pub(super) kept: Vec<u8>,
    /// Where a frame is made before it is encrypted.
    scratch: Vec<u8>,
    /// Goodbye has been sent.
    pub(super) ended: bool,
    /// The peer has proved that it may see what is kept.
    released: bool,
}

/// How frames travel.
#[derive(Default)]
pub(super) enum Channel {
    /// As they are.
    #[default]
    Clear,
    /// Only those of the handshake, and a Reject, as they are.
    Handshake(Noise),
    /// Encrypted.
    Noise(Noise),
}

impl Out {
    /// A caller's frame. Encryption fails only when the 2^64 numbers of messages are used up.
    pub(super) fn append(
        &mut self,
        write: impl FnOnce(&mut Vec<u8>) -> Result<(), EncodeError>,
    ) -> Result<(), SendError> {
        match &mut self.channel {
            Channel::Clear => write(self.outbox.tail())?,
            Channel::Noise(noise) if self.released => {
                self.scratch.clear();
                write(&mut self.scratch)?;
                noise.encrypt(&self.scratch, self.outbox.tail()).map_err(|_| SendError::Ended)?;
            }
            _ => write(&mut self.kept)?,
        }
        Ok(())
    }

    /// A frame of the session's own: through the channel if there is one, else in clear.
    pub(super) fn frame(&mut self, frame: &Frame<'_>) -> Result<(), SessionError> {
        let encode = |bytes: &mut Vec<u8>| {
            frame.encode(bytes).map_err(|EncodeError { what, len, limit, .. }| SessionError::Config {
                what,
                have: len as u64,
                limit: limit as u64,
            })
        };
        match &mut self.channel {
            Channel::Noise(noise) => {
                self.scratch.clear();
                encode(&mut self.scratch)?;
                noise.encrypt(&self.scratch, self.outbox.tail())
            }
            _ => encode(self.outbox.tail()),
        }
    }

    /// The last frame of a session that ends; what was kept is never sent.
    pub(super) fn last(&mut self, frame: &Frame<'_>) -> Result<(), SessionError> {
        self.kept = Vec::new();
        self.frame(frame)
    }

    pub(super) fn hello(&mut self, config: &SessionConfig) -> Result<(), SessionError> {
        let Identity { incarnation, boot_id, process, ref unix_name, ref advertised, features } = config.identity;
        let max_frame = config.limits.max_frame;
        let advertised = advertised.as_addresses();
        let versions = config.versions;
        self.frame(&Frame::Hello(Hello {
            versions,
            incarnation,
            boot_id,
            process,
            unix_name,
            advertised,
            max_frame,
            features,
        }))
    }

    /// The peer's handshake message: answers it if it is the first, and opens the channel.
    pub(super) fn handshake(&mut self, message: &[u8], config: &SessionConfig) -> Result<(), SessionError> {
        let Channel::Handshake(noise) = core::mem::take(&mut self.channel) else { return Err(SessionError::Decrypt) };
        // From here to the end the channel counts as clear, which is how the answer and a Reject travel.
        let (noise, answer) = noise.handshake(message).map_err(|error| match error {
            SessionError::Decrypt => SessionError::Refused { code: RejectCode::WrongSecret, versions: None },
            other => other,
        })?;
        if let Some(answer) = answer {
            self.frame(&Frame::Handshake(&answer))?;
        }
        self.channel = Channel::Noise(noise);
        self.hello(config)
    }

    /// The peer is established: what was kept for it goes out.
    pub(super) fn release(&mut self) -> Result<(), SessionError> {
        self.released = true;
        if let Channel::Noise(noise) = &mut self.channel {
            noise.encrypt(&self.kept, self.outbox.tail())?;
            self.kept = Vec::new();
        }
        Ok(())
    }
}

/// Moves one message from `inbox` to `clear`; `false` if it is not whole.
pub(super) fn decrypt(noise: &mut Noise, inbox: &mut Inbox, clear: &mut Inbox) -> Result<bool, SessionError> {
    let Some((len, rest)) = inbox.unread().split_first_chunk::<2>() else { return Ok(false) };
    let len = usize::from(u16::from_be_bytes(*len));
    if rest.len() < len {
        return Ok(false);
    }
    let message = &inbox.take(2 + len)[2..];
    // What is unread there is part of one frame, so it is shorter than a frame may be: the buffer stays bounded.
    let space = clear.space(len, usize::MAX);
    let filled = noise.decrypt(message, space)?;
    clear.filled(filled);
    Ok(true)
}

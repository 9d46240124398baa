//! Tickets as another author would write them, from the documented form alone.

use towline::engine::{Identity, PayloadId};
use towline::{Layout, Ticket};

pub(crate) fn ticket(identity: &Identity, id: PayloadId, layout: &Layout) -> Ticket {
    let mut out = vec![1];
    out.extend(identity.boot);
    out.extend(identity.incarnation);
    out.extend(id.slot.to_le_bytes());
    out.extend(id.generation.to_le_bytes());
    out.push(identity.advertised.len() as u8);
    for address in &identity.advertised {
        let text = address.to_string();
        out.push(text.len() as u8);
        out.extend(text.as_bytes());
    }
    let layout = encode(layout);
    out.extend((layout.len() as u32).to_le_bytes());
    out.extend(layout);
    out.extend(crc32c::crc32c(&out).to_le_bytes());
    Ticket::from_bytes(&out).expect("a ticket of the documented form")
}

fn encode(layout: &Layout) -> Vec<u8> {
    let mut out = (layout.parts().len() as u16).to_le_bytes().to_vec();
    for part in layout.parts() {
        out.push(part.dtype as u8);
        out.push(part.shape.len() as u8);
        out.extend((part.name.len() as u16).to_le_bytes());
        out.extend(part.len.to_le_bytes());
        for extent in &part.shape {
            out.extend(extent.to_le_bytes());
        }
        out.extend(part.name.as_bytes());
    }
    out
}

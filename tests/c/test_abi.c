/* test_abi.c: the offsets of the fields of kernels/backend.h, and the numbers of its enums. A number here changes only with
 * BACKEND_ABI. A field that is appended to a struct is appended here, too; tests/unit/test_header.py compares the lists. */
#include "check.h"

#include "../../kernels/backend.h"

#include <stddef.h>

TEST(the_abi_has_its_number)
{
    CHECK_EQ(BACKEND_ABI, 4);
    CHECK_EQ(GROUP_SLOTS, 8);
    CHECK_EQ(GROUP_ID_BYTES, 128);
}

#define AT(field, offset) _Static_assert(offsetof(struct OF, field) == (offset), #field);
#define SIZE(name, bytes) _Static_assert(sizeof(struct name) == (bytes), #name);
#define NUMBER(name, value) _Static_assert((name) == (value), #name);

/* clang-format off */

#define OF dtype_info
    AT(name, 0) AT(block_values, 8) AT(block_bytes, 12)
#undef OF
#define OF err
    AT(rc, 0) AT(code, 8) AT(message, 16) AT(what, 528) AT(tensor, 784) AT(free_bytes, 976)
#undef OF
#define OF view
    AT(data, 0) AT(width, 8) AT(stride, 12)
#undef OF
#define OF matrix_part
    AT(n_rows, 0) AT(dtype, 4)
#undef OF
#define OF matrix_desc
    AT(parts, 0) AT(n_parts, 8) AT(n_cols, 12) AT(use, 16) AT(arithmetic, 20) AT(n_experts, 24)
#undef OF
#define OF row_source
    AT(read, 0) AT(ctx, 8) AT(is_computed, 16)
#undef OF
#define OF row_run
    AT(first_row, 0) AT(n_rows, 4) AT(source_row, 8) AT(step, 16)
#undef OF
#define OF batch_view
    AT(n_rows, 0) AT(n_seqs, 4) AT(token_ids, 8) AT(positions, 16) AT(row_seq, 24) AT(seq_first_row, 32) AT(block_tokens, 40)
    AT(host_seq_first_row, 48) AT(shares_new_keys, 56) AT(max_tokens, 60)
#undef OF
#define OF kv_view
    AT(pool, 0) AT(page_bytes, 8) AT(layer_offset, 16) AT(table, 24) AT(table_stride, 32) AT(n_kv_heads, 36) AT(head_dim, 40)
    AT(dtype, 44)
#undef OF
#define OF embed_args
    AT(matrix, 0) AT(token_ids, 8) AT(n_rows, 16) AT(scale, 20) AT(out, 24) AT(first_row, 40)
    AT(first_id, 44) AT(end_id, 48)
#undef OF
#define OF linear_args
    AT(matrix, 0) AT(n_rows, 8) AT(x, 16) AT(y, 32) AT(bias, 48) AT(add, 56) AT(input, 64) AT(norm_weight, 72)
    AT(norm_eps, 80) AT(act, 84) AT(is_float_out, 88) AT(output, 92) AT(mid, 96) AT(delta, 112) AT(delta_stride, 120)
    AT(is_mirrored, 124)
#undef OF
#define OF lora_part
    AT(first_row, 0) AT(n_rows, 4) AT(head, 8) AT(a, 16) AT(b, 24)
#undef OF
#define OF lora_args
    AT(n_rows, 0) AT(n_parts, 4) AT(max_rank, 8) AT(parts, 16) AT(slots, 24) AT(slot_bytes, 32) AT(row_slots, 40) AT(rows, 48)
    AT(x, 56) AT(y, 72) AT(scratch, 88) AT(is_delta, 96) AT(is_bfloat16, 97) AT(first_row, 100) AT(base_bias, 104)
    AT(token_ids, 112) AT(factor, 120) AT(first_id, 124) AT(end_id, 128)
#undef OF
#define OF upload_beside_args
    AT(target, 0) AT(host, 8) AT(size_bytes, 16)
#undef OF
#define OF refresh_args
    AT(is_stale, 0)
#undef OF
#define OF rms_norm_args
    AT(n_rows, 0) AT(n_heads, 4) AT(x, 8) AT(out, 24) AT(weight, 40) AT(eps, 48) AT(weight_stride, 52)
#undef OF
#define OF gated_args
    AT(n_rows, 0) AT(act, 4) AT(gate, 8) AT(up, 24) AT(out, 40)
#undef OF
#define OF add_args
    AT(n_rows, 0) AT(a, 8) AT(b, 24) AT(out, 40)
#undef OF
#define OF add_rms_norm_args
    AT(n_rows, 0) AT(a, 8) AT(b, 24) AT(sum, 40) AT(out, 56) AT(weight, 72) AT(eps, 80) AT(inner_weight, 88)
    AT(inner_eps, 96) AT(router, 104) AT(route, 112) AT(linear, 120)
#undef OF
#define OF act_args
    AT(n_rows, 0) AT(act, 4) AT(x, 8) AT(out, 24) AT(limit, 40) AT(weights, 48)
#undef OF
#define OF take_args
    AT(n_rows, 0) AT(x, 8) AT(out, 24) AT(columns, 40)
#undef OF
#define OF pixels_args
    AT(n_rows, 0) AT(n_frames, 4) AT(bytes, 8) AT(table, 16) AT(out, 24)
#undef OF
#define OF embed_taps_args
    AT(table, 0) AT(weights, 8) AT(n_rows, 16) AT(n_taps, 20) AT(rows, 24) AT(out, 32)
#undef OF
#define OF place_rows_args
    AT(n_rows, 0) AT(rows, 8) AT(x, 16) AT(out, 32)
#undef OF
#define OF mean_rows_args
    AT(n_rows, 0) AT(n, 4) AT(x, 8) AT(out, 24)
#undef OF
#define OF splice_args
    AT(n_rows, 0) AT(is_sum, 4) AT(visual, 8) AT(features, 16) AT(x, 32)
#undef OF
#define OF grid_attention_args
    AT(batch, 0) AT(n_heads, 8) AT(head_dim, 12) AT(side, 16) AT(scale, 20) AT(lines, 24) AT(columns, 32) AT(rows, 40)
    AT(shares, 48) AT(q, 56) AT(k, 72) AT(v, 88) AT(out, 104)
#undef OF
#define OF position_scale_args
    AT(n_rows, 0) AT(every, 4) AT(first, 8) AT(slope, 12) AT(positions, 16) AT(x, 24) AT(out, 40)
#undef OF
#define OF layer_norm_args
    AT(n_rows, 0) AT(x, 8) AT(out, 24) AT(weight, 40) AT(bias, 48) AT(eps, 56) AT(n_heads, 60) AT(weight_stride, 64)
#undef OF
#define OF scale_logits_args
    AT(n_rows, 0) AT(scale, 4) AT(softcap, 8) AT(logits, 16)
#undef OF
#define OF spread_logits_args
    AT(n_rows, 0) AT(x, 8) AT(out, 24) AT(sources, 40)
#undef OF
#define OF select_args
    AT(n_selected, 0) AT(rows, 8) AT(x, 16) AT(out, 32) AT(other, 48)
#undef OF
#define OF rope_table_args
    AT(n_rows, 0) AT(n_freqs, 4) AT(positions, 8) AT(inv_freq, 16) AT(magnitude, 24) AT(table, 32) AT(axes, 40)
    AT(axis_stride, 48)
#undef OF
#define OF rope_args
    AT(n_rows, 0) AT(n_freqs, 4) AT(head_dim, 8) AT(interleaved, 12) AT(table, 16) AT(q, 24) AT(k, 40) AT(k_head_dim, 56)
    AT(is_tail, 60)
#undef OF
#define OF kv_write_args
    AT(batch, 0) AT(kv, 8) AT(k, 56) AT(v, 72)
#undef OF
#define OF qkv_args
    AT(q_norm, 0) AT(k_norm, 8) AT(eps, 16) AT(rope, 24) AT(write, 88) AT(norm_stride, 176)
#undef OF
#define OF attention_args
    AT(batch, 0) AT(kv, 8) AT(n_heads, 56) AT(window, 60) AT(scale, 64) AT(softcap, 68) AT(q, 72) AT(out, 88) AT(slopes, 104)
    AT(sinks, 112) AT(chunk, 120) AT(heads, 128) AT(visible_end, 136)
#undef OF
#define OF head_linear_args
    AT(matrix, 0) AT(n_rows, 8) AT(n_heads, 12) AT(head_rows, 16) AT(first_row, 20) AT(used_rows, 24) AT(is_transposed, 28)
    AT(x, 32) AT(out, 48)
#undef OF
#define OF latent_attention_args
    AT(batch, 0) AT(kv, 8) AT(n_heads, 56) AT(scale, 60) AT(q, 64) AT(q_rope, 80) AT(latent, 96) AT(rope_key, 112)
    AT(out, 128)
#undef OF
#define OF row_attention_args
    AT(batch, 0) AT(n_heads, 8) AT(n_kv_heads, 12) AT(head_dim, 16) AT(scale, 20) AT(q, 24) AT(k, 40) AT(v, 56) AT(out, 72)
#undef OF
#define OF state_view
    AT(pool, 0) AT(page_bytes, 8) AT(table, 16) AT(table_stride, 24) AT(first_entry, 28) AT(n_units, 32) AT(unit_bytes, 36)
    AT(units_per_page, 40)
#undef OF
#define OF conv_args
    AT(batch, 0) AT(state, 8) AT(n_taps, 56) AT(weight, 64) AT(bias, 72) AT(has_act, 80) AT(act, 84) AT(x, 88) AT(out, 104)
#undef OF
#define OF ssm_args
    AT(batch, 0) AT(state, 8) AT(n_heads, 56) AT(head_dim, 60) AT(n_groups, 64) AT(n_state, 68) AT(a_log, 72) AT(dt_bias, 80)
    AT(skip, 88) AT(dt_min, 96) AT(dt_max, 100) AT(x, 104) AT(dt, 120) AT(b, 136) AT(c, 152) AT(out, 168) AT(gate, 184)
    AT(act, 200) AT(b_norm, 208) AT(c_norm, 216) AT(dt_norm, 224) AT(norm_eps, 232) AT(dt_matrix, 240) AT(scratch, 248)
#undef OF
#define OF selective_scan_args
    AT(batch, 0) AT(state, 8) AT(n_state, 56) AT(a_log, 64) AT(dt_bias, 72) AT(skip, 80) AT(x, 88) AT(dt, 104) AT(b, 120)
    AT(c, 136) AT(out, 152) AT(gate, 168) AT(act, 184)
#undef OF
#define OF delta_args
    AT(batch, 0) AT(state, 8) AT(n_heads, 56) AT(n_key_heads, 60) AT(key_dim, 64) AT(value_dim, 68) AT(a_log, 72)
    AT(dt_bias, 80) AT(q, 88) AT(k, 104) AT(v, 120) AT(a, 136) AT(b, 152) AT(out, 168)
#undef OF
#define OF route
    AT(expert, 0) AT(weight, 4)
#undef OF
#define OF route_args
    AT(n_rows, 0) AT(n_experts, 4) AT(n_chosen, 8) AT(score, 12) AT(n_groups, 16) AT(chosen_groups, 20) AT(sums_two, 24)
    AT(is_normalised, 25) AT(sum_eps, 28) AT(scale, 32) AT(logits, 40) AT(logits_stride, 48) AT(selection_bias, 56)
    AT(routes, 64) AT(route_stride, 72)
#undef OF
#define OF experts_args
    AT(n_rows, 0) AT(n_experts, 4) AT(n_chosen, 8) AT(form, 12) AT(act, 16) AT(limit, 20) AT(is_input_scaled, 24) AT(up, 32)
    AT(down, 40) AT(up_bias, 48) AT(down_bias, 56) AT(routes, 64) AT(route_stride, 72) AT(x, 80) AT(y, 96) AT(scratch, 112)
    AT(first, 128) AT(n_local, 132) AT(is_by_route, 136) AT(half, 140) AT(first_column, 144) AT(lora, 152)
    AT(is_mirrored, 160)
#undef OF
#define OF experts_lora_parts
    AT(parts, 0) AT(n_parts, 64) AT(step, 72)
#undef OF
#define OF experts_lora
    AT(up, 0) AT(down, 80) AT(max_rank, 160) AT(slots, 168) AT(slot_bytes, 176) AT(row_slots, 184) AT(rows, 192) AT(scratch, 200)
#undef OF
#define OF combine_args
    AT(n_rows, 0) AT(n_chosen, 4) AT(is_input_scaled, 8) AT(routes, 16) AT(route_stride, 24) AT(results, 32) AT(y, 48)
#undef OF
#define OF page_copy
    AT(source, 0) AT(target, 4)
#undef OF
#define OF copy_pages_args
    AT(pool, 0) AT(page_bytes, 8) AT(copies, 16) AT(n_copies, 24)
#undef OF
#define OF table_run
    AT(first, 0) AT(count, 4)
#undef OF
#define OF batch_arrays
    AT(token_ids, 0) AT(positions, 8) AT(row_seq, 16) AT(seq_first_row, 24) AT(logits_rows, 32) AT(tables, 40)
#undef OF
#define OF begin_args
    AT(slot, 0) AT(n_rows, 4) AT(n_seqs, 8) AT(n_logits_rows, 12) AT(n_pad_rows, 16) AT(pad_row_seq, 20) AT(token_ids, 24)
    AT(positions, 32) AT(row_seq, 40) AT(seq_first_row, 48) AT(logits_rows, 56) AT(tables, 64) AT(runs, 72) AT(n_runs, 80)
    AT(to, 88) AT(row_adapters, 136) AT(has_adapters, 144)
#undef OF
#define OF token_bias
    AT(id, 0) AT(value, 4)
#undef OF
#define OF token_seen
    AT(id, 0) AT(count, 4) AT(in_prompt, 8)
#undef OF
#define OF sample_task
    AT(logits_row, 0) AT(is_score, 4) AT(is_greedy, 5) AT(wants_logprobs, 6) AT(target, 8) AT(temperature, 12) AT(top_p, 16)
    AT(min_p, 20) AT(top_k, 24) AT(repetition_penalty, 28) AT(presence_penalty, 32) AT(frequency_penalty, 36) AT(seed, 40)
    AT(sample_index, 48) AT(position, 52) AT(mode, 56) AT(n_top, 60) AT(top_offset, 64) AT(bias, 72) AT(n_bias, 80)
    AT(seen, 88) AT(n_seen, 96) AT(banned, 104) AT(n_banned, 112) AT(allowed, 120) AT(n_allowed, 128) AT(mask, 136)
#undef OF
#define OF sample_result
    AT(id, 0) AT(status, 4) AT(raw, 8) AT(full, 12) AT(processed, 16) AT(kept_mass, 20) AT(rank, 24)
#undef OF
#define OF sample_args
    AT(logits, 0) AT(vocab_size, 8) AT(vocab_stride, 12) AT(vocab_limit, 16) AT(banned, 24) AT(n_banned, 32) AT(tasks, 40)
    AT(n_tasks, 48) AT(n_logits_rows, 52) AT(results, 56) AT(top_ids, 64) AT(top_values, 72) AT(top_ranks, 80) AT(slot, 88)
    AT(first_task, 92)
#undef OF
#define OF tensor_view
    AT(data, 0) AT(dtype, 8) AT(n_rows, 12) AT(n_cols, 16) AT(row_stride, 24) AT(col_stride, 32) AT(is_host, 40)
#undef OF
#define OF tensor_place
    AT(matrix, 0) AT(part, 8) AT(vector, 16) AT(n_values, 24) AT(offset, 28) AT(first_row, 32) AT(n_rows, 36)
    AT(first_index, 40) AT(row_step, 48) AT(col_step, 56)
#undef OF
#define OF tensor_write_args
    AT(to, 0) AT(from, 64) AT(stream, 112)
#undef OF
#define OF matrix_borrow_args
    AT(matrix, 0) AT(part, 8) AT(rows, 16) AT(row_bytes, 24)
#undef OF
#define OF matrix_rows_args
    AT(matrix, 0) AT(part, 8) AT(rows, 16) AT(row_bytes, 24)
#undef OF
#define OF tensor_sum
    AT(sum, 0) AT(n_non_finite, 8)
#undef OF
#define OF tensor_sum_args
    AT(of, 0) AT(from, 64) AT(stream, 72) AT(result, 80) AT(is_check, 88)
#undef OF
#define OF import_args
    AT(device, 0) AT(handle, 8) AT(descriptor, 16) AT(size_bytes, 24) AT(event, 32)
#undef OF
#define OF group_options
    AT(device, 0) AT(nccl, 8) AT(id, 16) AT(rank, 24) AT(n_ranks, 28)
#undef OF
#define OF peers
    AT(import_memory, 0) AT(release_memory, 8) AT(export_memory, 16) AT(group_id, 24) AT(group_open, 32) AT(group_settle, 40)
    AT(group_buffer, 48) AT(group_greet, 56) AT(group_broadcast, 64) AT(group_wait, 72) AT(group_copy, 80)
    AT(group_close, 88)
#undef OF
#define OF comm_options
    AT(timeout_seconds, 0) AT(first_meeting, 8) AT(first_rank, 12) AT(n_all_ranks, 16) AT(exchange_ctx, 24) AT(exchange, 32)
    AT(check, 40) AT(nccl, 48) AT(group_id, 56) AT(process, 64) AT(n_processes, 68)
#undef OF
#define OF meet_args
    AT(slot, 0) AT(n_tasks, 4) AT(first_task, 8)
#undef OF
#define OF gather_args
    AT(kind, 0) AT(n_rows, 4) AT(whole, 8) AT(first, 24) AT(n_columns, 28) AT(a, 32) AT(b, 48) AT(token_ids, 64)
    AT(first_id, 72) AT(end_id, 76) AT(routes, 80) AT(route_stride, 88) AT(n_chosen, 92) AT(norm, 96) AT(is_stored, 104)
    AT(unit, 108) AT(combine, 112)
#undef OF
#define OF comm
    AT(size_bytes, 0) AT(open, 8) AT(share, 16) AT(meet, 24) AT(gather, 32) AT(check, 40) AT(abort, 48) AT(close, 56)
    AT(waits_on_device, 64) AT(most_of_several, 68) AT(least_shared_rows, 72) AT(mirrors, 80)
    AT(mirrors_parts, 88)
#undef OF
#define OF page_move
    AT(page, 0) AT(slot, 4)
#undef OF
#define OF move_list
    AT(moves, 0) AT(n_moves, 8) AT(number, 16) AT(after, 24)
#undef OF
#define OF move_args
    AT(pool, 0) AT(host, 8) AT(page_bytes, 16) AT(lists, 24) AT(awaited, 88) AT(slot_bytes, 104) AT(source, 112)
#undef OF
#define OF move_state
    AT(ended, 0) AT(bytes, 16) AT(seconds, 32) AT(source_bytes, 48) AT(source_seconds, 56)
#undef OF
#define OF moves
    AT(size_bytes, 0) AT(create, 8) AT(destroy, 16) AT(move, 24) AT(poll, 32) AT(lend, 40) AT(share, 48)
#undef OF
#define OF backend_options
    AT(device, 0) AT(isa, 8) AT(n_threads, 16) AT(max_rows, 20) AT(max_logits_rows, 24) AT(max_cols, 28) AT(vocab_size, 32)
    AT(dtype, 36) AT(max_model_len, 40) AT(max_group, 44) AT(max_head_dim, 48) AT(cublaslt, 56) AT(n_ranks, 64)
    AT(max_loras, 68)
#undef OF
#define OF device_info
    AT(name, 0) AT(total_bytes, 128) AT(free_bytes, 136) AT(uuid, 144) AT(kernels, 192)
#undef OF
#define OF device_traits
    AT(size_bytes, 0) AT(has_host_memory, 4) AT(default_tokens, 8) AT(default_seqs, 12) AT(quantised_dtype, 16)
    AT(library_rows, 20) AT(short_rows, 24) AT(short_tokens, 28) AT(rounds_tensors, 32)
#undef OF
#define OF backend_memory
    AT(held_bytes, 0) AT(total_bytes, 32) AT(free_bytes, 40)
#undef OF
#define OF backend
    AT(abi, 0) AT(size_bytes, 4) AT(name, 8) AT(traits, 16) AT(open, 24) AT(close, 32) AT(describe, 40) AT(fusions, 48)
    AT(supports, 56) AT(buffer_create, 64) AT(buffer_destroy, 72) AT(upload, 80) AT(download, 88) AT(synchronize, 96)
    AT(matrix_create, 104) AT(matrix_destroy, 112) AT(matrix_bytes, 120) AT(matrix_arithmetic, 128) AT(matrix_write, 136)
    AT(matrix_read, 144) AT(kv_layer_bytes, 152) AT(activations, 160) AT(device_info, 168) AT(matrix_fill, 176)
    AT(sample_finish, 184) AT(graph_begin, 192) AT(graph_end, 200) AT(graph_launch, 208) AT(graph_destroy, 216)
    AT(prepare, 224) AT(pool_create, 232) AT(pool_release, 240) AT(pool_restore, 248) AT(memory, 256) AT(allocations, 264)
    AT(tensor_finish, 272) AT(peers, 280) AT(pool_save, 288) AT(pool_forget, 296) AT(matrix_load, 304) AT(embed, 312)
    AT(linear, 320) AT(rms_norm, 328) AT(gated, 336) AT(add, 344) AT(select, 352) AT(rope_table, 360) AT(rope, 368)
    AT(kv_write, 376) AT(attention, 384) AT(qkv, 392) AT(act, 400) AT(layer_norm, 408) AT(row_attention, 416) AT(conv, 424)
    AT(ssm, 432) AT(selective_scan, 440) AT(delta, 448) AT(route, 456) AT(experts, 464) AT(head_linear, 472)
    AT(latent_attention, 480) AT(position_scale, 488) AT(scale_logits, 496) AT(sample, 504) AT(tensor_write, 512)
    AT(tensor_sum, 520) AT(copy_pages, 528) AT(begin, 536) AT(add_rms_norm, 544) AT(comm, 552) AT(combine, 560)
    AT(lora, 568) AT(take, 576) AT(moves, 584) AT(spread_logits, 592)
    AT(matrix_borrow, 600) AT(pixels, 608) AT(embed_taps, 616) AT(place_rows, 624) AT(mean_rows, 632) AT(splice, 640)
    AT(matrix_rows, 648) AT(grid_attention, 656) AT(upload_beside, 664) AT(refresh, 672)
#undef OF
#define OF backend_host
    AT(abi, 0) AT(revision, 4) AT(size_bytes, 8) AT(err_set, 16) AT(err_name, 24) AT(dtype_info, 32) AT(dtype_to_float, 40)
    AT(dtype_from_float, 48)
#undef OF

/* Structs in arrays do not grow. */
SIZE(matrix_part, 8) SIZE(table_run, 8) SIZE(token_bias, 8) SIZE(token_seen, 12) SIZE(sample_task, 144)
SIZE(sample_result, 28) SIZE(route, 8) SIZE(page_copy, 8) SIZE(view, 16) SIZE(lora_part, 32)
SIZE(experts_lora_parts, 80)
SIZE(page_move, 8) SIZE(move_list, 32)

NUMBER(DTYPE_F32, 0) NUMBER(DTYPE_F16, 1) NUMBER(DTYPE_Q4_0, 2) NUMBER(DTYPE_Q4_1, 3) NUMBER(DTYPE_Q5_0, 6)
NUMBER(DTYPE_Q5_1, 7) NUMBER(DTYPE_Q8_0, 8) NUMBER(DTYPE_Q2_K, 10) NUMBER(DTYPE_Q3_K, 11) NUMBER(DTYPE_Q4_K, 12)
NUMBER(DTYPE_Q5_K, 13) NUMBER(DTYPE_Q6_K, 14) NUMBER(DTYPE_I8, 24) NUMBER(DTYPE_I16, 25) NUMBER(DTYPE_I32, 26)
NUMBER(DTYPE_I64, 27) NUMBER(DTYPE_F64, 28) NUMBER(DTYPE_BF16, 30) NUMBER(DTYPE_MXFP4, 39)
NUMBER(DTYPE_IQ2_XXS, 16) NUMBER(DTYPE_IQ2_XS, 17) NUMBER(DTYPE_IQ3_XXS, 18) NUMBER(DTYPE_IQ1_S, 19) NUMBER(DTYPE_IQ4_NL, 20)
NUMBER(DTYPE_IQ3_S, 21) NUMBER(DTYPE_IQ2_S, 22) NUMBER(DTYPE_IQ4_XS, 23) NUMBER(DTYPE_IQ1_M, 29) NUMBER(DTYPE_TQ1_0, 34)
NUMBER(DTYPE_TQ2_0, 35)
NUMBER(DTYPE_U8, 64) NUMBER(DTYPE_BOOL, 65) NUMBER(DTYPE_FP8, 66) NUMBER(DTYPE_INT4_G128, 67)
NUMBER(DTYPE_INT4_G32, 68) NUMBER(DTYPE_INT8_G128, 69) NUMBER(DTYPE_INT8_G32, 70) NUMBER(DTYPE_NONE, 255)
NUMBER(RC_OK, 0) NUMBER(RC_MEMORY, 1)
NUMBER(RC_INVALID, 2) NUMBER(RC_CONFIG, 3) NUMBER(RC_CHECKPOINT, 4) NUMBER(RC_UNSUPPORTED, 5) NUMBER(RC_IO, 6)
NUMBER(RC_DEVICE, 7) NUMBER(RC_DEVICE_MEMORY, 8) NUMBER(RC_DEAD, 9) NUMBER(RC_BUSY, 10) NUMBER(RC_CLOSED, 11)
NUMBER(RC_INTERNAL, 12) NUMBER(RC_QUEUE_FULL, 13) NUMBER(RC_ASLEEP, 14) NUMBER(RC_WEIGHTS_MISSING, 15)
NUMBER(RC_WEIGHTS, 16) NUMBER(WEIGHTS_UNKNOWN, 1) NUMBER(WEIGHTS_MISMATCHED, 2) NUMBER(WEIGHTS_MISSING, 3)
NUMBER(ARITHMETIC_AUTO, 0) NUMBER(ARITHMETIC_FLOAT, 1) NUMBER(ARITHMETIC_INT8, 2) NUMBER(ARITHMETIC_BF16, 3)
NUMBER(ARITHMETIC_FP8, 4)
NUMBER(MATRIX_LINEAR, 1) NUMBER(MATRIX_EMBED, 2) NUMBER(MATRIX_EXPERTS, 4) NUMBER(MATRIX_ROUTER, 8)
NUMBER(MATRIX_LOGITS, 16) NUMBER(MATRIX_ROWS, 32) NUMBER(ACT_SILU, 0) NUMBER(ACT_GELU, 1) NUMBER(ACT_GELU_TANH, 2)
NUMBER(ACT_RELU, 3) NUMBER(ACT_RELU2, 4) NUMBER(ACT_TANH, 5)
NUMBER(ACT_SIGMOID, 6) NUMBER(ACT_CLIP, 7) NUMBER(ACT_XIELU, 8) NUMBER(ACT_IDENTITY, 9) NUMBER(ACT_SCALE, 10)
NUMBER(LINEAR_PLAIN, 0) NUMBER(LINEAR_RMS_NORM, 1) NUMBER(LINEAR_GATED, 2) NUMBER(LINEAR_SUM, 0) NUMBER(LINEAR_PRODUCT, 1)
NUMBER(ROUTE_SOFTMAX, 0) NUMBER(ROUTE_SIGMOID, 1) NUMBER(ROUTE_CHOSEN_SOFTMAX, 2) NUMBER(ROUTE_CHOSEN_SIGMOID, 3)
NUMBER(EXPERT_GATED, 0) NUMBER(EXPERT_CLAMPED, 1) NUMBER(EXPERT_PLAIN, 2) NUMBER(LOGPROB_RAW, 0) NUMBER(LOGPROB_FULL, 1)
NUMBER(LOGPROB_PROCESSED, 2) NUMBER(SAMPLE_OK, 0) NUMBER(SAMPLE_NON_FINITE, 1) NUMBER(SAMPLE_NONE_ALLOWED, 2)
NUMBER(FUSION_NORM_LINEAR, 1) NUMBER(FUSION_GATED_LINEAR, 2) NUMBER(FUSION_LINEAR_ADD, 4) NUMBER(FUSION_LINEAR_GATED, 8)
NUMBER(FUSION_ADD_NORM, 16) NUMBER(FUSION_NORM_ADD_NORM, 32) NUMBER(FUSION_SSM_GATED, 64) NUMBER(FUSION_SSM_INPUTS, 128)
NUMBER(FUSION_NORM_ROUTE, 256) NUMBER(FUSION_QKV_ATTENTION, 512) NUMBER(FUSION_ADD_NORM_LINEAR, 1024)
NUMBER(FUSION_GATHER_NORM, 2048) NUMBER(FUSION_LINEAR_DELTA, 4096) NUMBER(FUSION_EXPERTS_LORA, 16384)
NUMBER(FUSION_LORA_WHOLE, 131072) NUMBER(FUSION_LORA_BIASES, 262144) NUMBER(FUSION_EXPERTS_LORA_RANKS, 524288)
NUMBER(FUSION_LORA_BFLOAT16, 1048576)
NUMBER(LORA_BIAS_NONE, 0) NUMBER(LORA_BIAS_ADDS, 1) NUMBER(LORA_BIAS_REPLACES, 2)
NUMBER(GATHER_COLUMNS, 0) NUMBER(GATHER_ROWS, 1) NUMBER(GATHER_ROUTES, 2)
NUMBER(GATHER_TO_FIRST, 3) NUMBER(GATHER_TO_OWNERS, 4) NUMBER(COMM_ARENA, 0) NUMBER(COMM_LOGITS, 1)
NUMBER(MOVE_OUT, 0) NUMBER(MOVE_IN, 1)
NUMBER(MEMORY_WEIGHTS, 0) NUMBER(MEMORY_KV, 1) NUMBER(MEMORY_WORK, 2) NUMBER(MEMORY_PINNED, 3)

/* clang-format on */
